"""Lists the runs made by other code, settings or inputs than today's, and published files that were changed since.

Needs no other stage, so that it never starts one: what is there is audited as it is. No GPU.
"""


rule audit:
    log:
        "<results>/logs/audit.log",
    conda:
        "../../environment.yml"
    threads: 1
    params:
        settings=json.dumps({arm: json.loads(text) for arm, text in TRAINING.items()}),
        folder=f"results/{SETTINGS.experiment}",
    shell:
        """
        exec python workflow/scripts/audit.py {params.folder:q} \
            --settings {params.settings:q} \
            &> >(tee {log:q} >&2)
        """
