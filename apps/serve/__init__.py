"""The HTTP side of `mmsdk serve`: a server that clients of OpenAI's chat API talk to, on the engine of `mmsdk.serve`."""
