"""Figures, tables and the report, from the parquet files of the runs alone.

Needs the products of every selected run; promises the figures in three formats, the summary and one HTML page. No GPU,
and no torch.
"""

FIGURES = {
    "reward": "Reward",
    "k3_kl": "K3",
    "reward_vs_k3": "Reward against K3",
    "validation_reward": "Validation reward",
    "clean_reward": "Reward of the trained weights in BF16",
    "response_length": "Response length and truncation",
    "head_mass": "Head mass and correction strength",
    "drift_meter": "Drift: share of the gradient and coherence",
    "timing": "Time of a step by phase",
}


rule figures:
    input:
        metrics=expand("<results>/runs/{arm}/seed{seed}/metrics.parquet", arm=SETTINGS.run.arms, seed=SEEDS),
        timing=expand("<results>/runs/{arm}/seed{seed}/timing.parquet", arm=SETTINGS.run.arms, seed=SEEDS),
    output:
        *(file for name, title in FIGURES.items() for file in figure(f"figures/{name}", "Runs", title)),
        summary="<results>/summary.parquet",
        table=report(
            "<results>/summary.md",
            category="Runs",
            labels={"figure": "Summary", "format": "Table"},
            caption="../report/summary.rst",
        ),
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
            &> >(tee {log:q} >&2)
        """


rule report:
    input:
        runs=RUNS,
        figures=rules.figures.output,
        dataset="<results>/dataset/manifest.json",
        model="<results>/model/manifest.json",
        precision="<results>/precision/gate.json",
        smoke=expand("<results>/smoke/{arm}/gate.json", arm=SETTINGS.run.arms),
    output:
        page=report(
            "<results>/report.html",
            category="Report",
            labels={"figure": "Everything on one page", "format": "HTML"},
            caption="../report/report.rst",
        ),
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
            &> >(tee {log:q} >&2)
        """
