"""The formula that a step minimises."""
