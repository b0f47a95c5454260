//! Problems with descale factors per block of rows, and checks that are the same in each family.

use super::fp8::{self, WINDOW, edit_text, lines, problem};
use flashcore_kernels::{Arch, Plan, Program};
use problem::{Band, DType, Layout, Operand, OperandMap, Problem, ScaleLayout, Scales, Tensor};

/// The problem with descale factors of Q, K and V per block of so many rows, one for each KV head without
/// blocks (0), or none.
pub fn with_factors(problem: Problem, rows: [Option<u32>; 3]) -> Problem {
    let of = |rows: Option<u32>, seq| {
        rows.map(|rows| match rows {
            0 => ScaleLayout::per_head(problem.heads_kv),
            rows => ScaleLayout::per_block(problem.heads_kv, seq, rows),
        })
    };
    let [q, k, v] = rows;
    let scales = Scales { q: of(q, problem.seq_q), k: of(k, problem.seq_kv), v: of(v, problem.seq_kv) };
    Problem { scales, ..problem }
}

/// A change of a kernel's text.
type Change = fn(&str) -> String;

/// The faults of kernels with factors per block of rows: the factor of the neighbouring block instead of the
/// block's own, for blocks of 64 rows and of 128, and sums P V that are added without a factor.
fn faults() -> [(&'static str, Change); 3] {
    fn neighbour(text: &str, rows: u32) -> String {
        let shift = format!(", {};", rows.ilog2());
        let mut after_min = false;
        let changed = text.lines().map(|line| {
            let (block, minimum) =
                (line.trim().strip_prefix("shr.u32 "), line.trim().starts_with("min.u32 "));
            let swapped = match block.filter(|block| after_min && block.ends_with(&shift)) {
                None => String::new(),
                Some(block) => {
                    let to = block.split(',').next().unwrap_or_default();
                    format!("xor.b32 {to}, {to}, 1;\n")
                }
            };
            after_min = minimum;
            format!("{line}\n{swapped}")
        });
        changed.collect()
    }
    [
        ("factors of K and Q of the neighbouring block", |text| neighbour(text, 64)),
        ("factors of V of the neighbouring block", |text| neighbour(text, 128)),
        ("sums without the factor of V", |text| {
            lines(text, |line, _| {
                let operands = line.trim().strip_prefix("fma.rn.f32 ").unwrap_or_default();
                match operands.trim_end_matches(';').split(", ").collect::<Vec<_>>()[..] {
                    [to, sum, factor, old] if to == old && factor.starts_with('%') => {
                        Some(format!("add.rn.f32 {to}, {old}, {sum};"))
                    }
                    _ => Some(line.to_owned()),
                }
            })
        }),
    ]
}

/// The problem with a softcap and sinks.
pub fn capped(mut problem: Problem) -> Problem {
    (problem.score.softcap, problem.score.sink) = (Some(2.0), true);
    problem
}

/// The problem with factors per block whose blocks lie `block` elements apart; 0 repeats one factor.
pub fn with_strides(problem: Problem, block: i64) -> Problem {
    let layout = |rows| Some(ScaleLayout { rows: Some(rows), batch: 0, head: 1, block });
    let scales = Scales { q: layout(64), k: layout(128), v: layout(64) };
    Problem { scales, ..problem }
}

/// The factors of Q, K and V.
const FACTORS: [Operand; 3] =
    [Operand::Descale(Tensor::Q), Operand::Descale(Tensor::K), Operand::Descale(Tensor::V)];

/// Checks runs with a factor of a block that is not accepted: it makes rows NaN that see its keys or values,
/// and no others. A factor of 0 of Q or K makes the logits of its block 0. `plan` gives the plan, with so
/// many keys in a block, and the architecture for the bad factor of a number.
pub fn bad_factors_of_blocks(plan: impl Fn(usize, &Problem, u32) -> (Plan, Arch)) {
    for (i, bad) in [f32::NAN, f32::INFINITY, -1.0, 0.0].into_iter().enumerate() {
        let [q, k, v] = FACTORS;
        for (factors, block) in [(q, 0), (q, 1), (k, 1), (k, 3), (v, 1), (v, 3)] {
            for (band, sums) in [(Band::CAUSAL, 64), (WINDOW, 64), (Band::CAUSAL_TOP_LEFT, 0)] {
                // Without blocks, V has one factor, and the case is that of a head.
                if sums == 0 && factors == v {
                    continue;
                }
                let p = Problem::new(1, 1, 130, 32, DType::E4m3).with_band(band).with_lse(true);
                let p = with_factors(p.with_seq_kv(250, Layout::Bshd), [Some(64), Some(64), Some(sums)]);
                let (plan, arch) = plan(i, &p, if sums == 0 { 128 } else { 64 });
                let spoil = |of: &mut OperandMap<Vec<f32>>| of[factors][block] = bad;
                fp8::run_with_factors(&p, &plan, &arch, 3, |_| {}, spoil).check();
            }
        }
    }
}

/// Checks runs with factors of heads that are not accepted, also two negative ones, whose product is
/// positive. Rows that see no key are 0, with and without a sink. `plan` takes the number of the run.
pub fn bad_factors_of_heads(plan: impl Fn(usize, &Problem) -> Plan, arch: &Arch) {
    for (i, bad) in [f32::NAN, f32::INFINITY, -1.0].into_iter().enumerate() {
        for (seq_q, seq_kv, band, sink) in [
            (70, 130, Band::FULL, false),
            (130, 70, Band::CAUSAL, false),
            (100, 40, WINDOW, true),
            (100, 40, Band::CAUSAL, true),
        ] {
            let mut p = with_factors(problem(seq_q, seq_kv, 32, "e4m3", band), [Some(0); 3]);
            p.score.sink = sink;
            p.score.softcap = (sink && i == 1).then_some(2.0);
            let [q, k, v] = FACTORS;
            for (j, spoiled) in [&[q][..], &[k], &[v], &[q, k]].into_iter().enumerate() {
                let spoil = |of: &mut OperandMap<Vec<f32>>| spoiled.iter().for_each(|&f| of[f][1] = bad);
                fp8::run_with_factors(&p, &plan(i + j, &p), arch, 3, |_| {}, spoil).check();
            }
        }
    }
}

/// Checks that the comparison detects kernels with one fault each in their factors per block of rows.
pub fn faults_are_seen(plan: impl Fn(&Problem) -> Plan, arch: &Arch) {
    let problem = problem(256, 256, 64, "e4m3", Band::FULL);
    let problem = with_factors(problem, [Some(64), Some(64), Some(128)]);
    let run = |edit: &dyn Fn(&mut Program)| fp8::run(&problem, &plan(&problem), arch, 9, edit);
    let changes =
        faults().map(|(fault, change)| (fault, move |program: &mut Program| edit_text(program, change)));
    fp8::faults_are_seen(run, &changes.each_ref().map(|(fault, change)| (*fault, change as fp8::Fault<'_>)));
}
