"""What `LLM` and `AsyncLLM` share: text to tokens, tokens to text, outputs of requests."""
