"""Lists the runs made by other code, settings or inputs than today's, and published files that were changed since.

Needs no other stage, so that it never starts one: what is there is audited as it is. No GPU.
"""

import json


rule audit:
    log:
        "<results>/logs/audit.log",
    conda:
        "../../environment.yml"
    threads: 1
    params:
        folder=f"results/{SETTINGS.experiment}",
        settings=lambda _: json.dumps({arm: json.loads(stage_json(resolved(arm), "train")) for arm in ARMS}),
    shell:
        """
        exec python workflow/scripts/audit.py {params.folder:q} \
            --settings {params.settings:q} \
            &> >(tee {log:q} >&2)
        """
