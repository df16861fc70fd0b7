"""The lineage of one sample, from its prompt to the version that it helped make."""
