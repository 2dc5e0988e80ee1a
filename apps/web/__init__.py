"""The demo in the browser: one file a tab, over one model that all visitors share. It needs the extra `demo`, which brings Gradio."""
