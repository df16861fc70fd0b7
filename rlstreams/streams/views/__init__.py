"""Pure folds over the topics: what people look at."""
