"""Checks every file of the experiment against its manifest, whenever asked.

Needs no other stage, so that it never starts one: what is there is audited as it is. No GPU.
"""


rule audit:
    log:
        "<results>/logs/audit.log",
    conda:
        "../../environment.yml"
    threads: 1
    params:
        folder=f"results/{SETTINGS.experiment}",
    shell:
        """
        exec python workflow/scripts/audit.py {params.folder:q} 2> >(tee {log:q} >&2)
        """
