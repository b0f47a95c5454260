//! Tests of more batch entries and heads than a launch has CTAs in y and z: grids are flat. Kernels run in
//! the emulator for a few entries beyond the limit.

use emu::{Buffer, Options, run};
use flashcore_kernels::forward::small::RowOrder;
use flashcore_kernels::select::{Device, TunedTable, choose};
use flashcore_kernels::{Arch, BufferKind, Family, Plan, Program, emit, quantize};
use half::f16;
use problem::program::library as lib;
use problem::{Band, DType, Layout, Operand, PassKind, Problem, Program as Expression, Quantization, Tensor};
use ptx::Dim3;
use serde_json::{Value, json};

/// More than 65,535.
const MANY: usize = 70_000;
/// The entries that are computed. Their number modulo 3 is that of their place, for a mask that reads it.
const PICKED: [usize; 5] = [0, 1, 65_537, 65_538, 69_997];

/// An element of a row; `place` is the place of the row's entry in [`PICKED`].
fn element(tensor: Tensor, [place, row]: [usize; 2], d: usize) -> f16 {
    let seed = 31 * place + 7 * row + 3 * tensor as usize;
    f16::from_f32(((seed + 5 * d) * 37 % 64) as f32 / 32.0 - 1.0)
}

/// Runs the CTAs of the given entries (of the batch or of the heads), and returns the bytes of their outputs.
/// CTAs of an entry are neighbours in the order of the grid. `outputs` names the buffers.
fn outputs(problem: &Problem, program: &Program, entries: &[usize], outputs: &[&str]) -> Vec<Vec<u8>> {
    let count = problem.batch * problem.heads_q;
    let specs = &program.contracts.buffers;
    let mut buffers: Vec<Buffer> = specs.iter().map(|spec| Buffer::sparse(spec.bytes)).collect();
    for (buffer, spec) in buffers.iter_mut().zip(specs) {
        let Some(Operand::Tensor(tensor)) = spec.kind.operand() else { continue };
        let [_, _, rows, dim] = problem.extents(tensor);
        for (place, &entry) in entries.iter().enumerate() {
            let elements = (0..rows * dim).map(|i| element(tensor, [place, i / dim], i % dim));
            let bytes: Vec<u8> = elements.flat_map(f16::to_le_bytes).collect();
            buffer.write_at(entry * bytes.len(), &bytes);
        }
    }
    for kernel in program.kernels() {
        let Dim3(x, y, z) = kernel.launch.grid;
        assert!(y <= 65_535 && z <= 65_535, "{:?}", kernel.launch.grid);
        let of_entry = u64::from(x) * u64::from(y) * u64::from(z) / count as u64;
        let first = |entry: &usize| *entry as u64 * of_entry;
        let only = entries.iter().flat_map(|entry| first(entry)..first(entry) + of_entry).collect();
        let options = Options { only: Some(only), collectives_order: true, ..Options::default() };
        let report = run(&kernel, &mut buffers.iter_mut().collect::<Vec<_>>(), &options).unwrap();
        let failures: Vec<_> = report.hazards.iter().filter(|h| h.fails()).collect();
        assert!(failures.is_empty(), "{}: {}", kernel.entry, failures[0]);
    }
    let read = |name: &&str| {
        let at = specs.iter().position(|spec| spec.kind.name() == *name).unwrap();
        let bytes = buffers[at].len() / count;
        let of_entry = |&entry: &usize| buffers[at].read_at(entry * bytes..(entry + 1) * bytes);
        entries.iter().flat_map(of_entry).collect()
    };
    outputs.iter().map(read).collect()
}

/// Checks that the picked entries of a problem with many have the bits of a problem with these entries alone.
fn check(problem: &Problem, plan: &Plan, arch: &Arch) {
    let few = if problem.batch == MANY {
        Problem { batch: PICKED.len(), ..problem.clone() }
    } else {
        Problem { heads_q: PICKED.len(), heads_kv: PICKED.len(), ..problem.clone() }
    };
    let few = few.with_layout(Layout::Bhsd);
    let program = |problem: &Problem| emit(problem, plan, arch).unwrap_or_else(|e| panic!("{plan:?}: {e}"));
    let (names, all) = (["out", "lse"], [0, 1, 2, 3, 4]);
    let found = outputs(problem, &program(problem), &PICKED, &names);
    assert!(found == outputs(&few, &program(&few), &all, &names), "{plan:?}");
}

fn with(plan: &Plan, genes: &[(&str, Value)]) -> Plan {
    let mut plan = json!(plan);
    for (gene, value) in genes {
        plan[*gene] = value.clone();
    }
    serde_json::from_value(plan).unwrap()
}

/// Problems with many batch entries or many heads.
fn problems(seq_q: usize, seq_kv: usize, band: Band) -> [Problem; 2] {
    [[MANY, 1], [1, MANY]].map(|[batch, heads]| {
        let problem = Problem::new(batch, heads, seq_q, 32, DType::F16).with_band(band);
        problem.with_seq_kv(seq_kv, Layout::Bhsd).with_lse(true)
    })
}

/// The default plan of every device computes problems with many entries.
#[test]
fn default_plans_take_many_entries() {
    for arch in Arch::ALL {
        for dtype in [DType::F16, DType::Bf16, DType::F32] {
            for band in Band::NAMED {
                for problem in problems(1, 16, band) {
                    let problem = problem.with_dtypes(dtype.into()).with_layout(Layout::Bhsd);
                    let device = Device { name: "NVIDIA H200", arch };
                    let choice = choose(&problem, &device, TunedTable::builtin()).unwrap();
                    emit(&problem, &choice.plan, &arch).unwrap();
                }
            }
        }
    }
}

#[test]
fn mma_takes_many_entries() {
    for band in [Band::FULL, Band::CAUSAL] {
        for problem in problems(20, 40, band) {
            let plan = Family::Mma.default_for(&problem, &Arch::SM_80).unwrap();
            // Two row blocks follow each other in x, or are not divided.
            for genes in [json!([16, "rows_first"]), json!([32, "rows_first"]), json!([32, "heads_first"])] {
                let warps = genes[0].as_u64().unwrap() / 16;
                let genes = [
                    ("block_m", genes[0].clone()),
                    ("warps", warps.into()),
                    ("kv_warps", 1.into()),
                    ("tile_order", genes[1].clone()),
                ];
                check(&problem, &with(&plan, &genes), &Arch::SM_80);
            }
            let split = [("splits", 2.into()), ("tile_order", "rows_first".into()), ("block_n", 32.into())];
            check(&problem, &with(&plan, &split), &Arch::SM_80);
        }
    }
}

#[test]
fn small_families_take_many_entries() {
    for family in [Family::SmallStreamed, Family::SmallAtOnce] {
        for problem in problems(20, 40, Band::CAUSAL) {
            let plan = family.default_for(&problem, &Arch::SM_90).unwrap();
            for order in [RowOrder::ByHead, RowOrder::LongestFirst, RowOrder::Folded] {
                for cluster in [1, 2] {
                    let genes = [
                        ("tile_order", json!(order)),
                        ("cluster", cluster.into()),
                        ("row_warpgroups", 1.into()),
                        ("store", "pairs".into()),
                    ];
                    check(&problem, &with(&plan, &genes), &Arch::SM_90);
                }
            }
        }
    }
}

/// Lists of blocks, with a mask that depends on the batch entry.
#[test]
fn lists_of_many_entries_are_written() {
    let [mut problem, _] = problems(20, 96, Band::FULL);
    let mask = (lib::key() / 32 % 3).ne(lib::batch() % 3);
    problem.programs.mask = Some(Expression::new(&mask).unwrap());
    for (family, genes) in [
        (Family::Mma, json!({ "block_n": 32, "block_m": 32, "warps": 2, "kv_warps": 1 })),
        (Family::Wgmma, json!({ "block_n": 32, "consumers": 1, "handout": "grid" })),
    ] {
        let plan = family.default_for(&problem, &Arch::SM_90).unwrap();
        let genes: Vec<(&str, Value)> =
            genes.as_object().unwrap().iter().map(|(gene, value)| (gene.as_str(), value.clone())).collect();
        let plan = with(&with(&plan, &genes), &[("visits", "listed".into())]);
        check(&problem, &plan, &Arch::SM_90);
    }
}

/// Quantisation in one kernel and in two, with and without smoothed keys.
#[test]
fn many_entries_are_quantised() {
    let plain = Quantization::per_head(DType::E4m3);
    for problem in problems(20, 20, Band::FULL) {
        let problem = Problem { pass: Problem::mission().pass, ..problem };
        // A kernel that goes through the tensor from its end computes an entry in the place of another.
        let picked: Vec<usize> = PICKED.into_iter().chain(PICKED.map(|entry| MANY - 1 - entry)).collect();
        let all: Vec<usize> = (0..picked.len()).collect();
        let few = if problem.batch == MANY { [picked.len(), 1] } else { [1, picked.len()] };
        let few = Problem { batch: few[0], heads_q: few[1], heads_kv: few[1], ..problem.clone() };
        let few = few.with_layout(Layout::Bhsd);
        for options in [plain, Quantization { smooth_keys: true, ..plain }] {
            let program =
                |problem: &Problem| quantize::emit(problem, Tensor::K, &options, &Arch::SM_90).unwrap();
            let program_of_many = program(&problem);
            let kinds = program_of_many.contracts.buffers.iter().map(|buffer| buffer.kind);
            let kinds = kinds.filter(|kind| !matches!(kind, BufferKind::Temporary(_)));
            let names: Vec<&str> = kinds.map(BufferKind::name).filter(|name| *name != "k").collect();
            assert_eq!(names.len(), 2, "{names:?}");
            let found = outputs(&problem, &program_of_many, &picked, &names);
            assert!(found == outputs(&few, &program(&few), &all, &names), "{options:?}");
        }
    }
}

/// The transposition of 8-bit values.
#[test]
fn values_of_many_entries_are_transposed() {
    let [problem, _] = problems(20, 40, Band::FULL);
    let problem = problem.with_dtypes(DType::E4m3.into()).with_layout(Layout::Bhsd);
    let plan = Family::Wgmma.default_for(&problem, &Arch::SM_90).unwrap();
    let program = emit(&problem, &plan, &Arch::SM_90).unwrap();
    let grids: Vec<Dim3> = program.contracts.steps.iter().map(|step| step.launch.grid).collect();
    assert_eq!(grids[0], Dim3(MANY as u32, 1, 1));
}

/// Grids beyond 2^31 CTAs are refused by name.
#[test]
fn too_many_ctas_are_refused() {
    let [problem, _] = problems(1, 16, Band::FULL);
    let problem = Problem { heads_q: 40_000, heads_kv: 40_000, ..problem }.with_layout(Layout::Bhsd);
    let refused = Family::Mma.default_for(&problem, &Arch::SM_80).unwrap_err().to_string();
    let expected = "invalid value '2800000000' for CTAs (row blocks · splits · heads_q · batch): expected fewer \
                    than 2^31 in x, or in all if y or z has more than 65535";
    assert_eq!(refused, expected);
}

/// Extents and strides of any size are computed or refused, in every family.
#[test]
fn extreme_extents_are_computed_or_refused() {
    let sizes = [1, 3, 1 << 16, (1 << 31) - 1, 1 << 31, 1 << 33, 1 << 40];
    let (mut computed, mut refused) = (0, 0);
    for (batch, heads) in sizes.into_iter().flat_map(|batch| sizes.map(|heads| (batch, heads))) {
        for (seq_q, seq_kv) in [(1, 1), (1, 1 << 31), (1 << 31, 1), (1 << 33, 1 << 33), (1 << 29, 1 << 29)] {
            for band in [Band::FULL, Band::CAUSAL, Band::window(u32::MAX, 0), Band::window(1, u32::MAX)] {
                let fits =
                    [batch, heads, seq_q.max(seq_kv)].iter().map(|&n: &usize| n as f64).product::<f64>();
                if fits > 2f64.powi(50) {
                    continue;
                }
                let problem = Problem::new(batch, heads, seq_q, 64, DType::Bf16);
                let problem = problem.with_seq_kv(seq_kv, Layout::Bhsd).with_band(band).with_lse(true);
                for family in Family::of_pass(PassKind::Forward) {
                    match family.default_for(&problem, &Arch::SM_90) {
                        Ok(plan) => {
                            flashcore_kernels::bind(&problem, &plan, &Arch::SM_90).unwrap();
                            computed += 1;
                        }
                        Err(error) => {
                            assert!(error.to_string().contains("expected"), "{problem:?}: {error}");
                            refused += 1;
                        }
                    }
                }
            }
        }
    }
    assert!(computed > 100 && refused > 100, "{computed} {refused}");
}
