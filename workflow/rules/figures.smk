"""Figures, tables and the report, from the parquet files of the runs alone.

Needs the products of every selected run; promises the figures in three formats, the summary and one HTML page. No GPU,
and no torch.
"""


rule figures:
    input:
        metrics=expand("<results>/runs/{arm}/seed{seed}/metrics.parquet", arm=SETTINGS.run.arms, seed=SEEDS),
        timing=expand("<results>/runs/{arm}/seed{seed}/timing.parquet", arm=SETTINGS.run.arms, seed=SEEDS),
    output:
        reward=report(
            multiext("<results>/figures/reward", ".png", ".svg", ".pdf"),
            category="Runs",
            caption="../report/reward.rst",
        ),
        k3_kl=report(
            multiext("<results>/figures/k3_kl", ".png", ".svg", ".pdf"),
            category="Runs",
            caption="../report/k3_kl.rst",
        ),
        reward_vs_k3=report(
            multiext("<results>/figures/reward_vs_k3", ".png", ".svg", ".pdf"),
            category="Runs",
            caption="../report/reward_vs_k3.rst",
        ),
        summary="<results>/summary.parquet",
        table=report("<results>/summary.md", category="Runs", caption="../report/summary.rst"),
    log:
        "<results>/logs/figures.log",
    conda:
        "../../environment.yml"
    threads: 1
    params:
        settings=stage_json(SETTINGS, "figures"),
        folder=subpath(output.summary, parent=True),
    shell:
        """
        exec python workflow/scripts/figures.py \
            --settings {params.settings:q} \
            --experiment-dir {params.folder:q} \
            --output-dir {params.folder:q} \
            2> >(tee {log:q} >&2)
        """


rule report:
    input:
        runs=RUNS,
        figures=rules.figures.output,
        precision="<results>/precision/gate.json",
        smoke=expand("<results>/smoke/{arm}/gate.json", arm=SETTINGS.run.arms),
    output:
        page="<results>/report.html",
    log:
        "<results>/logs/report.log",
    conda:
        "../../environment.yml"
    threads: 1
    params:
        settings=stage_json(SETTINGS, "figures"),
        folder=subpath(output.page, parent=True),
    shell:
        """
        exec python workflow/scripts/report.py \
            --settings {params.settings:q} \
            --experiment-dir {params.folder:q} \
            --output {output.page:q} \
            2> >(tee {log:q} >&2)
        """
