"""`rlstreams up`: a broker and every role on this machine, started, watched, restarted, drained."""
