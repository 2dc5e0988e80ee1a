"""Vision-language models, one file per family: how its vision, connector, decoder and template fit together."""
