"""Training of `mini`, the default vision-language model: data, grounding, fine-tuning, evaluation.

Run as `python -m mmsdk.apps.train_mini`. Read in the order of the data: vocabulary, scenes, clips, questions, features, ground, finetune.
"""
