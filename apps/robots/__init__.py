"""What `mmsdk robot` can do, a module each; `mmsdk.apps.commands.robot` imports the one that is asked for."""
