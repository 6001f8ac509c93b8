"""Responses sampled by a running server that speaks OpenAI's API, such as vLLM, SGLang or `transformers serve`."""
