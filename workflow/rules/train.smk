"""One training run for each arm and seed: rule `train_<arm>`, and the arm's own name as its target.

Needs the manifests of dataset and model, the arm's quantised model and the passed gates; promises the metrics, the resolved
configuration and the manifest of the run. Checkpoints and the append-only log lie undeclared in `state/`, so that a
killed run resumes. Uses the GPU where `runtime.device` is cuda.

Gates are ancient: they must exist, but a gate that is judged again retrains nothing. Snakemake 9.27 does not look at the
params of a job behind such an edge while the gate is due itself, so an arm's settings reach it as a file of their own.
Loggers reach it beside that file, as a param that Snakemake takes for derived: where a run is shown is no reason to train.
So does `--afresh`, where the job is forced: a finished run whose files are merely gone is declared again, not trained.

The log's `tee` ignores stop signals: a trainer that is asked to stop still has a checkpoint to write and to tell of.
"""


rule settings:
    output:
        settings="<results>/settings/{arm}.json",
    log:
        "<results>/logs/settings/{arm}.log",
    conda:
        "../../environment.yml"
    threads: 1
    params:
        settings=lambda wildcards: TRAINING[wildcards.arm],
    shell:
        """
        printf '%s\\n' {params.settings:q} >{output.settings:q} 2>{log:q}
        """


for arm in ARMS:

    rule:
        name:
            f"train_{arm}"
        input:
            settings="<results>/settings/<arm>.json",
            dataset="<results>/dataset/manifest.json",
            model="<results>/model/manifest.json",
            quantised=quantised(TRAINED[arm]),
            precision=ancient("<results>/precision/gate.json"),
            smoke=ancient("<results>/smoke/<arm>/gate.json"),
        output:
            metrics="<results>/runs/<arm>/seed{seed}/metrics.parquet",
            timing="<results>/runs/<arm>/seed{seed}/timing.parquet",
            config="<results>/runs/<arm>/seed{seed}/config.yaml",
            run="<results>/runs/<arm>/seed{seed}/run.json",
        log:
            "<results>/logs/train/<arm>/seed{seed}.log",
        pathvars:
            arm=arm,
        conda:
            "../../environment.yml"
        threads: 1
        resources:
            gpu=GPU,
        params:
            arm=arm,
            folder=subpath(output.run, parent=True),
            logger=lambda wildcards, output, arm=arm: LOGGERS[arm],
            afresh=lambda wildcards, output, arm=arm: afresh(f"train_{arm}", output),
        shell:
            """
            [ -t 2 ] || exec &> >(
                trap '' INT TERM USR1 USR2
                exec tee -p {log:q} >&2
            )
            exec python workflow/scripts/train.py \
                --baseline {params.arm:q} \
                --seed {wildcards.seed:q} \
                --settings "$(cat {input.settings:q})" \
                --dataset-manifest {input.dataset:q} \
                --model-manifest {input.model:q} \
                --quantised-config {input.quantised:q} \
                --parent "$PPID" \
                --run-dir {params.folder:q} {params.afresh} \
                trainer.logger={params.logger:q}
            """

    rule:
        name:
            arm
        input:
            expand("<results>/runs/{arm}/seed{seed}/run.json", arm=arm, seed=SEEDS),
