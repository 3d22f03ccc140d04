"""An OpenAI server over `AsyncLLM`: `trtspec serve`. It needs the extra `serve`."""
