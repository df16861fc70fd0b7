"""Role `prompts`: data set to prompts, paced by the ledger."""
