"""What `mmsdk robot` and `mmsdk ros` can do, a module each; `mmsdk.apps.commands` import the one that is asked for."""
