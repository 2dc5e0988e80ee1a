"""Vision backbones, one file per family: what each reads from its transformer. `mmsdk.vision.encode.Encoder` does the rest."""
