# The whole machine: read this, workflow/Snakefile and dflash/stages.py.
include: "workflow/Snakefile"


rule run:
    """The default target: everything that the config's runs need."""
    default_target: True
    input:
        rules.all.input,
