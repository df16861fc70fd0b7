"""`rlstreams try`: a few rows through prompt, model and reward, without a broker."""
