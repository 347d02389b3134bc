"""Studies beside the experiment, each a target that `all` does not need: `drift`, `faults`, `sweep`,
`stale`, `collapse`.

Need the manifests of dataset and model and the quantised models, no gate: the studies leave the range that the gates
guard. `collapse` makes a further model for each of its entropies. Runs of all but drift are training runs as any other, so they resume; their perturbation is part of their
identity. Use the GPU where `runtime.device` is cuda.
"""


rule study_settings:
    output:
        settings="<results>/{study}/settings/{cell}/{arm}.json",
    log:
        "<results>/logs/{study}/settings/{cell}/{arm}.log",
    wildcard_constraints:
        study="|".join(STUDIES),
        cell="|".join(map(re.escape, sorted({cell for names in CELLS.values() for cell in names}))),
    conda:
        "../../environment.yml"
    threads: 1
    params:
        settings=lambda wildcards: study_stage(wildcards).on_the_console().to_json(),
    shell:
        """
        printf '%s\\n' {params.settings:q} >{output.settings:q} 2>{log:q}
        """


rule study_run:
    input:
        settings="<results>/{study}/settings/{cell}/{arm}.json",
        dataset="<results>/dataset/manifest.json",
        model=lambda wildcards: f"{study_results(wildcards)}/model/manifest.json",
        quantised=lambda wildcards: quantised(study_stage(wildcards), results=study_results(wildcards)),
    output:
        metrics="<results>/{study}/runs/{cell}/{arm}/seed{seed}/metrics.parquet",
        timing="<results>/{study}/runs/{cell}/{arm}/seed{seed}/timing.parquet",
        config="<results>/{study}/runs/{cell}/{arm}/seed{seed}/config.yaml",
        run="<results>/{study}/runs/{cell}/{arm}/seed{seed}/run.json",
    log:
        "<results>/logs/{study}/runs/{cell}/{arm}/seed{seed}.log",
    wildcard_constraints:
        study="|".join(STUDIES),
        cell="|".join(map(re.escape, sorted({cell for names in CELLS.values() for cell in names}))),
        seed=r"\d+",
    conda:
        "../../environment.yml"
    threads: 1
    resources:
        gpu=GPU,
    params:
        folder=subpath(output.run, parent=True),
        afresh=lambda wildcards, output: afresh("study_run", output),
        logger=lambda wildcards, output: json.dumps(study_stage(wildcards).trainer.logger),
    shell:
        """
        [ -t 2 ] || exec &> >(
            trap '' INT TERM USR1 USR2
            exec tee -p {log:q} >&2
        )
        exec python workflow/scripts/train.py \
            --baseline {wildcards.arm:q} \
            --seed {wildcards.seed:q} \
            --settings "$(cat {input.settings:q})" \
            --dataset-manifest {input.dataset:q} \
            --model-manifest {input.model:q} \
            --quantised-config {input.quantised:q} \
            --parent "$PPID" \
            --run-dir {params.folder:q} {params.afresh} \
            trainer.logger={params.logger:q}
        """


rule sweep:
    input:
        metrics=study_files("sweep", "metrics.parquet"),
        run=study_files("sweep", "run.json"),
    output:
        *figure("sweep/sweep", "Studies", "Precision against arm"),
        table="<results>/sweep/sweep.parquet",
    log:
        "<results>/logs/sweep.log",
    conda:
        "../../environment.yml"
    threads: 1
    params:
        folders=lambda wildcards, input: [os.path.dirname(path) for path in input.run],
        stem=lambda wildcards, output: os.path.splitext(output.table)[0],
    shell:
        """
        exec python workflow/scripts/studies.py sweep \
            --runs {params.folders:q} \
            --output {params.stem:q} \
            &> >(tee {log:q} >&2)
        """


rule stale:
    input:
        metrics=study_files("stale", "metrics.parquet"),
        run=study_files("stale", "run.json"),
    output:
        *figure("stale/stale", "Studies", "Stale samplers"),
        table="<results>/stale/stale.parquet",
    log:
        "<results>/logs/stale.log",
    conda:
        "../../environment.yml"
    threads: 1
    params:
        folders=lambda wildcards, input: [os.path.dirname(path) for path in input.run],
        stem=lambda wildcards, output: os.path.splitext(output.table)[0],
    shell:
        """
        exec python workflow/scripts/studies.py stale \
            --runs {params.folders:q} \
            --output {params.stem:q} \
            &> >(tee {log:q} >&2)
        """


use rule model as collapse_model with:
    output:
        manifest="<results>/collapse/entropies/{entropy}/model/manifest.json",
    log:
        "<results>/logs/collapse/entropies/{entropy}/model.log",
    params:
        settings=lambda wildcards: entropy_model_stage(interpolated(), SETTINGS, wildcards.entropy).to_json(),
        folder=subpath(output.manifest, parent=True),


use rule quantise as collapse_quantise with:
    input:
        model="<results>/collapse/entropies/{entropy}/model/manifest.json",
    output:
        config="<results>/collapse/entropies/{entropy}/model/{quantised}/config.json",
        manifest="<results>/collapse/entropies/{entropy}/model/{quantised}/manifest.json",
    log:
        "<results>/logs/collapse/entropies/{entropy}/{quantised}.log",


rule collapse:
    input:
        metrics=study_files("collapse", "metrics.parquet"),
        run=study_files("collapse", "run.json"),
    output:
        *figure("collapse/collapse", "Studies", "Where training collapses"),
        table="<results>/collapse/collapse.parquet",
        text="<results>/collapse/collapse.md",
    log:
        "<results>/logs/collapse.log",
    conda:
        "../../environment.yml"
    threads: 1
    params:
        settings=stage_json(SETTINGS, "collapse"),
        runs=lambda wildcards, output: os.path.join(os.path.dirname(output.table), "runs"),
        stem=lambda wildcards, output: os.path.splitext(output.table)[0],
    shell:
        """
        exec python workflow/scripts/collapse.py \
            --settings {params.settings:q} \
            --runs {params.runs:q} \
            --output {params.stem:q} \
            &> >(tee {log:q} >&2)
        """


rule fault_check:
    input:
        dataset="<results>/dataset/manifest.json",
        model="<results>/model/manifest.json",
        quantised=quantised(SETTINGS, *(resolved(arm) for arm in SETTINGS.run.arms)),
    output:
        check="<results>/faults/check.parquet",
    log:
        "<results>/logs/fault_check.log",
    conda:
        "../../environment.yml"
    threads: 1
    resources:
        gpu=GPU,
    params:
        settings=stage_json(SETTINGS, "fault_check"),
    shell:
        """
        exec python workflow/scripts/faults.py \
            --settings {params.settings:q} \
            --dataset-manifest {input.dataset:q} \
            --model-manifest {input.model:q} \
            --quantised-config {input.quantised:q} \
            --output {output.check:q} \
            &> >(tee {log:q} >&2)
        """


rule faults:
    input:
        check="<results>/faults/check.parquet",
        metrics=study_files("faults", "metrics.parquet"),
        run=study_files("faults", "run.json"),
    output:
        *figure("faults/faults", "Studies", "Damaged INT4 cache"),
        table="<results>/faults/faults.parquet",
    log:
        "<results>/logs/faults.log",
    conda:
        "../../environment.yml"
    threads: 1
    params:
        folders=lambda wildcards, input: [os.path.dirname(path) for path in input.run],
        stem=lambda wildcards, output: os.path.splitext(output.table)[0],
    shell:
        """
        exec python workflow/scripts/studies.py faults \
            --measured {input.check:q} \
            --runs {params.folders:q} \
            --output {params.stem:q} \
            &> >(tee {log:q} >&2)
        """


rule drift_run:
    input:
        dataset="<results>/dataset/manifest.json",
        model="<results>/model/manifest.json",
        quantised=quantised(SETTINGS),
    output:
        rows="<results>/drift/runs/{sampler}/{centering}/seed{seed}.parquet",
        weights=temp("<results>/drift/runs/{sampler}/{centering}/seed{seed}.safetensors"),
    log:
        "<results>/logs/drift/{sampler}/{centering}/seed{seed}.log",
    wildcard_constraints:
        sampler="|".join(SAMPLERS),
        centering="|".join(ways_to_center(SETTINGS.drift.head_sizes)),
        seed=r"\d+",
    conda:
        "../../environment.yml"
    threads: 1
    resources:
        gpu=GPU,
    params:
        settings=stage_json(SETTINGS, "drift"),
    shell:
        """
        exec python workflow/scripts/drift.py \
            --settings {params.settings:q} \
            --sampler {wildcards.sampler:q} \
            --centering {wildcards.centering:q} \
            --seed {wildcards.seed:q} \
            --dataset-manifest {input.dataset:q} \
            --model-manifest {input.model:q} \
            --quantised-config {input.quantised:q} \
            --output {output.rows:q} \
            &> >(tee {log:q} >&2)
        """


rule drift_table:
    input:
        rows=drift_files("parquet"),
        weights=drift_files("safetensors"),
    output:
        table="<results>/drift/drift.parquet",
    log:
        "<results>/logs/drift_table.log",
    conda:
        "../../environment.yml"
    threads: 1
    params:
        stem=lambda wildcards, output: os.path.splitext(output.table)[0],
    shell:
        """
        exec python workflow/scripts/studies.py drift-table \
            --measured {input.rows:q} \
            --output {params.stem:q} \
            &> >(tee {log:q} >&2)
        """


rule drift:
    input:
        table="<results>/drift/drift.parquet",
    output:
        *figure("drift/drift", "Studies", "Drift without a learning signal"),
    log:
        "<results>/logs/drift.log",
    conda:
        "../../environment.yml"
    threads: 1
    params:
        stem=lambda wildcards, input: os.path.splitext(input.table)[0],
    shell:
        """
        exec python workflow/scripts/studies.py drift \
            --measured {input.table:q} \
            --output {params.stem:q} \
            &> >(tee {log:q} >&2)
        """
