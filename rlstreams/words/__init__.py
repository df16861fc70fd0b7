"""How what the log holds is said: tokens, texts, numbers, times, one sample stage by stage."""
