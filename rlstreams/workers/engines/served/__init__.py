"""Model servers behind the `Engine` port: vLLM and SGLang, spoken to over HTTP."""
