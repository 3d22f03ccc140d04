"""An OpenAI server: `trtspec serve`. It needs the extra `serve`."""
