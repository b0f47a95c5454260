//! Tests of the gate with uneven sequence lengths: right kernels pass, and kernels that take a length or a
//! start from the wrong place fail. No array contents lead a kernel outside its tensors.

use emu::{Buffer, HazardKind, Options};
use flashcore_check::gate::{Feed, Settings, Verdict, bind, check_kernel};
use flashcore_check::launchfile::{Bound, Role};
use judge::inputs::{Style, draw};
use judge::values::Values;
use kernels::{Arch, Family, Plan};
use problem::{Band, Corner, DType, Layout, LengthArray, Operand, Problem, SideLengths};
use serde_json::{Value, json};

use crate::common::SMALL;

const FAMILIES: [Family; 2] = [Family::Mma, Family::Wgmma];

/// A problem of four sequences of at most 100 queries and 130 keys, in tensors `[batch, row, head, dim]`.
fn problem(dtype: DType, [heads_q, heads_kv]: [usize; 2], dim: usize) -> Problem {
    let mut problem = Problem::new(4, heads_q, 100, dim, dtype).with_lse(true);
    problem.seq_kv = 130;
    problem.with_heads_kv(heads_kv, Layout::Bshd)
}

fn packed(rows: usize) -> SideLengths {
    SideLengths { packed: Some(rows), used: false }
}

const USED: SideLengths = SideLengths { packed: None, used: true };

/// Every way to state lengths, every kind of band, group sizes 1, 5 and 8, and head dims that fill a panel of
/// shared memory or do not.
fn problems() -> Vec<(&'static str, Problem)> {
    let (f16, bf16) = (DType::F16, DType::Bf16);
    let with = |mut problem: Problem, q: SideLengths, kv: SideLengths, left_padded: bool| {
        problem.lengths = problem::Lengths { q, kv, left_padded };
        problem
    };
    let even = SideLengths::default();
    let used_and_packed = |rows| SideLengths { packed: Some(rows), used: true };
    let unequal_dims = |mut problem: Problem, dim_v: usize| {
        problem.head_dim_v = dim_v;
        problem.with_layout(Layout::Bshd)
    };
    vec![
        (
            "packed, causal",
            with(problem(f16, [2, 2], 64), packed(210), packed(290), false).with_band(Band::CAUSAL),
        ),
        (
            "packed, top-left causal, no LSE",
            with(problem(bf16, [5, 1], 64), packed(210), packed(290), false)
                .with_band(Band::CAUSAL.aligned(Corner::TopLeft))
                .with_lse(false),
        ),
        (
            "packed and used",
            with(problem(bf16, [2, 2], 128), used_and_packed(210), used_and_packed(290), false),
        ),
        ("used queries", with(problem(f16, [8, 1], 64), USED, even, false).with_band(Band::window(37, 5))),
        (
            "used keys, top-left window",
            with(problem(f16, [2, 2], 40), even, USED, false)
                .with_band(Band::window(60, 20).aligned(Corner::TopLeft)),
        ),
        ("used, softcap", with(problem(bf16, [2, 1], 96), USED, USED, false).with_softcap(2.0)),
        ("left padding", with(problem(f16, [2, 1], 64), even, USED, true).with_band(Band::CAUSAL)),
        (
            "left padding of packed keys",
            with(unequal_dims(problem(f16, [2, 2], 72), 64), USED, packed(290), true),
        ),
        (
            "many short sequences",
            with(
                Problem { batch: 37, seq_q: 20, seq_kv: 20, ..problem(bf16, [1, 1], 16) },
                packed(400),
                packed(420),
                false,
            )
            .with_band(Band::CAUSAL)
            .with_layout(Layout::Bshd),
        ),
        ("packed queries of even keys", with(problem(f16, [2, 2], 64), packed(210), even, false)),
    ]
}

fn bound(family: Family, problem: &Problem) -> Bound {
    let plan = family.default_for(problem, &Arch::SM_90).unwrap();
    bind(&plan, problem, &Arch::SM_90).unwrap()
}

/// The default plan of the `wgmma` family with other genes.
fn with_genes(problem: &Problem, genes: &Value) -> Plan {
    let base = Family::Wgmma.default_for(problem, &SMALL).unwrap();
    let mut plan = serde_json::to_value(&base).unwrap();
    plan.as_object_mut().unwrap().extend(genes.as_object().unwrap().clone());
    serde_json::from_value(plan).unwrap()
}

/// The default kernels of the families, and that of `wgmma` with TMA stores if the problem allows them.
fn every_store(problem: &Problem) -> Vec<(&'static str, Bound)> {
    let bulk = with_genes(problem, &json!({ "store": "bulk", "packing": "apart" }));
    let bulk = bind(&bulk, problem, &SMALL).ok().map(|bound| ("wgmma, bulk", bound));
    let default = FAMILIES.map(|family| (family.name(), bound(family, problem)));
    default.into_iter().chain(bulk).collect()
}

#[test]
fn uneven_lengths_pass() {
    for family in FAMILIES {
        for (name, problem) in problems() {
            problem.check().unwrap();
            let report = check_kernel(&bound(family, &problem), &Settings::quick()).unwrap();
            assert_eq!(report.verdict, Verdict::Passed, "{family:?} {name}: {:?}", report.reasons);
        }
    }
}

/// Schedules and packings of the `wgmma` family other than its defaults, where a CTA computes several tiles.
#[test]
fn uneven_lengths_pass_under_every_schedule() {
    let problems = problems();
    for (at, genes) in [
        (0, json!({ "handout": "static", "tiles": "overlapped", "queries_ahead": 1 })),
        (1, json!({ "handout": "grid", "consumers": 1, "packing": "apart", "turns": "free" })),
        (1, json!({ "handout": "dynamic", "consumers": 1, "turns": "free", "diagonal": "halved" })),
        (2, json!({ "handout": "folded", "tile_order": "in_order", "ends": "common" })),
        (3, json!({ "handout": "static", "tile_order": "strided", "packing": "packed", "consumers": 2 })),
        (6, json!({ "handout": "dynamic", "consumers": 2, "tiles": "overlapped", "products": "in_turn" })),
        (0, json!({ "store": "bulk", "handout": "dynamic", "tiles": "overlapped" })),
        (2, json!({ "store": "bulk", "handout": "static" })),
        (3, json!({ "store": "bulk", "packing": "apart" })),
        (7, json!({ "store": "bulk" })),
        (0, json!({ "store": "over_queries", "queries_ahead": 1, "stages": 1 })),
        (7, json!({ "store": "over_queries", "tiles": "overlapped" })),
        (2, json!({ "store": "over_queries", "queries_ahead": 1, "block_n": 64, "packing": "apart" })),
        (
            8,
            json!({ "handout": "dynamic", "consumers": 2, "stages": 2, "queries_ahead": 1, "turns": "free" }),
        ),
        (
            8,
            json!({ "handout": "dynamic", "consumers": 2, "stages": 2, "tiles": "overlapped", "turns": "free" }),
        ),
    ] {
        let (name, problem) = &problems[at];
        let bound = bind(&with_genes(problem, &genes), problem, &SMALL).unwrap();
        let report = check_kernel(&bound, &Settings::quick()).unwrap();
        assert_eq!(report.verdict, Verdict::Passed, "{name} {genes}: {:?}", report.reasons);
    }
}

#[test]
fn plans_that_cannot_follow_uneven_lengths_are_refused() {
    let (_, problem) = &problems()[2];
    for (gene, value) in [("cluster", json!(2)), ("tail", json!("shared"))] {
        let plan = with_genes(problem, &json!({ gene: value }));
        let refused = plan.check(problem, &Arch::SM_90).unwrap_err().to_string();
        assert!(refused.contains(&format!("{gene} with uneven lengths")), "{refused}");
    }
    let mut apart = problems().remove(3).1;
    apart.out.batch += 8;
    let plan = with_genes(&apart, &json!({ "store": "bulk", "packing": "apart" }));
    let refused = plan.check(&apart, &Arch::SM_90).unwrap_err().to_string();
    assert!(refused.contains("multiples of the row stride with uneven queries"), "{refused}");
}

#[test]
fn lengths_do_not_change_the_code() {
    for family in FAMILIES {
        for (name, problem) in problems() {
            let mut other = problem.clone();
            other.batch += 3;
            for side in [&mut other.lengths.q, &mut other.lengths.kv] {
                side.packed = side.packed.map(|rows| rows + 33);
            }
            if other.lengths.q.packed.is_none() {
                other.seq_q += 1;
            }
            let other = other.with_layout(Layout::Bshd);
            let plan = family.default_for(&problem, &Arch::SM_90).unwrap();
            let text = |problem| kernels::emit(problem, &plan, &Arch::SM_90).unwrap().module.to_string();
            assert_eq!(text(&problem), text(&other), "{family:?} {name}");
        }
    }
}

/// Rows before the first sequence and after the last one belong to no sequence, and a sequence may have one
/// row or none.
#[test]
fn rows_outside_sequences_keep_their_values() {
    let (_, problem) = &problems()[0];
    for (what, bound) in every_store(problem) {
        let mut inputs = draw(problem, Style::Normal, 1);
        for (array, lengths) in [
            (LengthArray::CumulativeQ, [17, 100, 100, 101, 190]),
            (LengthArray::CumulativeKv, [3, 90, 91, 91, 200]),
        ] {
            inputs[Operand::Lengths(array)] = Values::I32(lengths.to_vec());
        }
        let feed = Feed::of(inputs);
        let references = feed.references(&bound).unwrap().unwrap();
        let mut buffers = feed.buffers(&bound);
        let mut handles: Vec<&mut Buffer> = buffers.iter_mut().collect();
        let report = emu::run(&bound.kernel, &mut handles, &Options::default()).unwrap();
        assert!(report.hazards.is_empty(), "{what}: {:?}", report.hazards);
        let after: Vec<Vec<u8>> = buffers.iter().map(Buffer::to_bytes).collect();
        let figures = feed.judge(&bound, &references, &after).unwrap();
        assert_eq!(figures.reasons(), [""; 0], "{what}");
        let out = bound.roles.iter().position(|r| *r == Role::Operand(Operand::OUT)).unwrap();
        let row_bytes = 2 * problem.out.row as usize;
        let kept = [0..17 * row_bytes, 190 * row_bytes..after[out].len()];
        assert!(kept.into_iter().all(|range| after[out][range].iter().all(|byte| *byte == 0xff)), "{what}");
    }
}

/// Arrays that do not ascend, are negative, or exceed the tensors.
const HOSTILE: [[i32; 5]; 6] = [
    [0, 90, 20, 210, 100],
    [210, 150, 100, 50, 0],
    [i32::MIN, -1, i32::MAX, 7, i32::MIN],
    [i32::MAX; 5],
    [-5; 5],
    [60, 61, 1 << 30, 64, 210],
];

#[test]
fn hostile_lengths_stay_inside_the_tensors() {
    let hidden = [HazardKind::OutOfBounds, HazardKind::Misaligned];
    for (name, problem) in problems() {
        for (what, bound) in every_store(&problem) {
            for values in HOSTILE {
                let feed = Feed::draw(&bound, Style::Normal, 1).unwrap();
                let mut buffers = feed.buffers(&bound);
                for (buffer, role) in buffers.iter_mut().zip(&bound.roles) {
                    if let Role::Operand(Operand::Lengths(array)) = role {
                        let skipped = usize::from(*array == LengthArray::CumulativeKv);
                        let values = values.iter().cycle().skip(skipped).take(array.len(&problem).unwrap());
                        let bytes: Vec<u8> = values.flat_map(|x| x.to_le_bytes()).collect();
                        *buffer = Buffer::from_bytes(&bytes);
                    }
                }
                let mut handles: Vec<&mut Buffer> = buffers.iter_mut().collect();
                let report = emu::run(&bound.kernel, &mut handles, &Options::default()).unwrap();
                let found: Vec<_> = report.hazards.iter().filter(|h| hidden.contains(&h.kind)).collect();
                assert!(found.is_empty(), "{what} {name} {values:?}: {found:?}");
            }
        }
    }
}

#[test]
fn kernels_with_a_wrong_length_or_start_fail() {
    let problem = |lse: bool| problems().remove(if lse { 0 } else { 1 }).1;
    for family in FAMILIES {
        let lengths = [("seq_q", 1), ("seq_q", -1), ("seq_kv", 1), ("seq_kv", -1)];
        for lse in [false, true] {
            let bound = bound(family, &problem(lse));
            for (longest, by) in lengths {
                let failed = fails(&bound, |text| with_length(text, longest, by));
                assert!(failed, "{family:?}: lengths up to {longest} by {by}");
            }
            let failed = fails(&bound, |text| with_start_of_the_neighbour(text, "rows_kv"));
            assert!(failed, "{family:?}: keys of the neighbour");
        }
        let padded = |text: &str| {
            let [rows, seq] = ["rows_q", "seq_q"].map(|name| register(text, name));
            changed(text, |line| line.contains("mul.wide.u32").then(|| line.replace(&rows, &seq)))
        };
        assert!(fails(&bound(family, &problem(true)), padded), "{family:?}: the LSE in the padded layout");
    }
}

/// Whether the kernel with a changed text fails the gate.
fn fails(bound: &Bound, change: impl Fn(&str) -> String) -> bool {
    let text = bound.kernel.module.to_string();
    let mutant = change(&text);
    assert!(mutant != text, "the change finds nothing to change");
    let mut bound = bound.clone();
    bound.kernel.module = ptx::parse(&mutant).unwrap().verify().unwrap();
    check_kernel(&bound, &Settings::quick()).unwrap().verdict == Verdict::Failed
}

/// The register into which a parameter is loaded, with the comma or semicolon that ends an operand.
fn register(text: &str, parameter: &str) -> String {
    let load = text.lines().find(|line| line.contains(&format!("[{parameter}]"))).unwrap();
    let name = load.split(['\t', ' ', ',']).find(|word| word.starts_with("%r")).unwrap();
    format!("{name};")
}

fn changed(text: &str, change: impl Fn(&str) -> Option<String>) -> String {
    text.lines().map(|line| change(line).unwrap_or_else(|| line.to_owned()) + "\n").collect()
}

/// The first operand of an instruction: the register that receives the result.
fn result(line: &str) -> &str {
    line.split([' ', ',']).find(|word| word.starts_with("%r")).unwrap()
}

/// Changes each length that is clamped to `longest`.
fn with_length(text: &str, longest: &str, by: i32) -> String {
    let longest = register(text, longest);
    changed(text, |line| {
        let cuts = line.contains("min.s32") && line.ends_with(&longest);
        cuts.then(|| format!("{line}\n\tadd.s32 {0}, {0}, {by};", result(line)))
    })
}

/// Takes rows from the next sequence instead of the right one. The lengths stay the same.
fn with_start_of_the_neighbour(text: &str, rows: &str) -> String {
    let rows = register(text, rows);
    let cuts: Vec<&str> =
        text.lines().filter(|line| line.contains("min.s32") && line.ends_with(&rows)).map(result).collect();
    changed(text, |line| {
        let ends_with = |pair: &&[&str]| line.ends_with(&format!(" {}, {};", pair[1], pair[0]));
        let pair = cuts.chunks_exact(2).find(ends_with).filter(|_| line.contains("sub.s32"))?;
        Some(format!("{line}\n\tmov.b32 {}, {};", pair[0], pair[1]))
    })
}
