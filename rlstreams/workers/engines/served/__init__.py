"""Model servers behind the `Engine` port: vLLM and SGLang over HTTP."""
