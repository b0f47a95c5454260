//! Checks a native plan before its time counts. The rules are those of the gate, but the plan runs on the
//! machine itself instead of in the emulator. All cases are small problems of the same kind, and their
//! references are computed once.

use cpu::{CpuError, CpuPlan};
use problem::{Layout, Problem, ProblemError, ScaleLayout, Scales, Tensor};

use check::gate::torture;
use judge::inputs::{Style, draw};
use judge::outputs::{References, dense_rows};
use judge::values::{Inputs, Values};

/// Upper limits of the small problem: batches, key heads, query heads per key head, rows and keys. Rows and
/// keys are not multiples of a block.
const MOST: [usize; 5] = [2, 2, 4, 71, 203];
/// Number of draws of normal inputs.
const SEEDS: u64 = 2;
/// Number of draws of invalid descale factors: one for each kind of invalid factor.
const FACTORS: u64 = 4;

/// Inputs with their references.
pub(super) struct Cases(Vec<Case>);

struct Case {
    name: String,
    problem: Problem,
    inputs: Inputs,
    references: References,
}

impl Cases {
    /// The cases for a problem.
    pub(super) fn of(problem: &Problem) -> Result<Cases, ProblemError> {
        let small = small(problem);
        let ordinary = (1..=SEEDS).map(|seed| (Style::Normal, seed));
        let others = Style::ALL.into_iter().filter(|&style| style != Style::Normal).map(|style| (style, 1));
        let factors = (1..=FACTORS).map(|seed| (Style::BadFactors, seed));
        let fp8 = [(Style::Saturated, 1)].into_iter().chain(factors).filter(|_| small.dtypes.has_fp8());
        let own = ordinary.chain(others).chain(fp8).map(|(style, seed)| {
            let problem = if style == Style::BadFactors { with_factors(&small) } else { small.clone() };
            Case::draw(format!("{}, seed {seed}", style.name()), problem, style, seed)
        });
        let torture = torture::problems(problem.dtypes, problem.head_dim).into_iter();
        let torture =
            torture.map(|case| Case::draw(case.name.to_owned(), case.problem, Style::PoisonedPadding, 1));
        own.chain(torture).collect::<Result<_, _>>().map(Cases)
    }

    /// The failures of all cases, and the relative error of the worst case.
    pub(super) fn judge(&self, plan: &CpuPlan) -> Result<(Vec<String>, f64), CpuError> {
        let (mut reasons, mut error) = (Vec::new(), 0.0f64);
        for case in &self.0 {
            for lse in [true, false] {
                let (found, rel) = case.judge(plan, lse)?;
                let asked = if lse { "" } else { ", no LSE" };
                reasons.extend(found.into_iter().map(|reason| format!("{}{asked}: {reason}", case.name)));
                error = error.max(rel);
            }
        }
        Ok((reasons, error))
    }
}

impl Case {
    fn draw(name: String, problem: Problem, style: Style, seed: u64) -> Result<Case, ProblemError> {
        let inputs = draw(&problem, style, seed);
        let references = References::of(&problem, &inputs)?;
        Ok(Case { name, problem, inputs, references })
    }

    /// Runs the plan into poisoned outputs. With an LSE requested, 16-bit inputs take a different path.
    fn judge(&self, plan: &CpuPlan, with_lse: bool) -> Result<(Vec<String>, f64), CpuError> {
        let p = &self.problem;
        let mut out = Values::zeros(p.dtypes.out, p.span(Tensor::Out).map_or(0, |(elements, _)| elements));
        out.fill_nan();
        let mut lse = vec![f32::NAN; if with_lse { p.lse_len() } else { 0 }];
        self.inputs.attention_into(p, plan, &mut out, with_lse.then_some(&mut lse[..]))?;
        let (elements, poison) = (out.len(), out.count_nan());
        let dense = out.gather(p, Tensor::Out);
        // Rows that belong to no sequence must stay poisoned, as must the elements between rows.
        let rows = dense_rows(p, &self.inputs.sequences(p));
        let places = rows.iter().flat_map(|&row| row * p.head_dim_v..(row + 1) * p.head_dim_v);
        let values: Vec<f64> = places.filter_map(|i| dense.get(i)).map(f64::from).collect();
        let lse: Vec<f64> = rows.iter().filter_map(|&row| lse.get(row).copied()).map(f64::from).collect();
        let figures = self.references.judge(&values, with_lse.then_some(&lse[..]));
        let mut reasons = figures.reasons();
        let between = elements - values.len();
        if poison - values.iter().filter(|x| x.is_nan()).count() != between {
            reasons.push(format!("of {between} elements between rows some were written"));
        }
        Ok((reasons, figures.rel))
    }
}

/// A problem of the same kind that is computed quickly.
fn small(problem: &Problem) -> Problem {
    let [batch, heads_kv, group, rows, keys] = MOST;
    let (heads_kv, group) = (problem.heads_kv.min(heads_kv), problem.group_size().min(group));
    Problem {
        batch: problem.batch.min(batch),
        heads_q: heads_kv * group,
        heads_kv,
        seq_q: problem.seq_q.min(rows),
        seq_kv: problem.seq_kv.min(keys),
        ..problem.clone()
    }
    .with_layout(Layout::Bhsd)
}

/// The problem with descale factors per KV head for each 8-bit input. Calls with factors use the plan too.
fn with_factors(problem: &Problem) -> Problem {
    let layout = |tensor| {
        let is_fp8 = problem.dtypes.of(tensor).is_fp8();
        is_fp8.then(|| ScaleLayout::per_head(problem.heads_kv))
    };
    let scales = Scales { q: layout(Tensor::Q), k: layout(Tensor::K), v: layout(Tensor::V) };
    Problem { scales, ..problem.clone() }
}

#[cfg(test)]
mod tests {
    use cpu::{Isa, Lanes};
    use problem::{Band, DType, DTypes, Operand};

    use super::*;

    #[test]
    fn the_default_plans_pass_and_a_wrong_answer_does_not() {
        let decode = Problem::new(1, 8, 1, 128, DType::Bf16).with_heads_kv(2, Layout::Bhsd);
        let problems = [
            decode.with_seq_kv(4096, Layout::Bhsd),
            Problem::new(1, 2, 512, 64, DType::F16).with_band(Band::CAUSAL),
            Problem::new(1, 2, 64, 64, DType::F32),
            Problem::new(1, 1, 320, 64, DType::F32),
        ];
        for problem in problems {
            let mut cases = Cases::of(&problem).unwrap();
            let plan = CpuPlan::for_problem(&problem);
            let (reasons, error) = cases.judge(&plan).unwrap();
            assert_eq!(reasons, [""; 0], "{plan:?}");
            assert!(error > 0.0 && error < 1e-2, "{error}");
            // The references no longer belong to the inputs.
            cases.0[0].inputs[Operand::V] = cases.0[1].inputs[Operand::V].clone();
            assert!(cases.judge(&plan).unwrap().0[0].starts_with("normal, seed 1: "));
        }
    }

    /// A gate that refuses the default plan can measure no candidate: `evolve` then has no baseline. The
    /// first four problems were refused, because one rounding of a logit decided the error of standard
    /// attention.
    #[test]
    fn the_default_plans_pass_on_a_grid_of_problems() {
        let f32s = [(2, 4), (4, 8), (2, 8), (2, 12)].map(|(batch, heads)| (batch, heads, 128, 64, "f32"));
        let others = [(1, 4, 40, 32), (1, 2, 71, 128), (1, 2, 20, 256), (1, 8, 1, 64)];
        let others = ["f16", "bf16", "f32", "e4m3", "e5m2:f16"]
            .into_iter()
            .flat_map(|dtypes| others.map(|(batch, heads, rows, dim)| (batch, heads, rows, dim, dtypes)));
        for (batch, heads, rows, dim, dtypes) in f32s.into_iter().chain(others) {
            let problem = Problem::new(batch, heads, rows, dim, dtypes.parse::<DTypes>().unwrap());
            let problem = if rows == 1 { problem.with_seq_kv(200, Layout::Bhsd) } else { problem };
            let (reasons, _) = Cases::of(&problem).unwrap().judge(&CpuPlan::for_problem(&problem)).unwrap();
            assert_eq!(reasons, [""; 0], "{problem:?}");
        }
    }

    #[test]
    fn plans_for_8_bit_inputs_are_checked_on_the_styles_of_8_bit_inputs() {
        for dtypes in ["e4m3", "e5m2/e4m3/bf16:f32"] {
            let dtypes: DTypes = dtypes.parse().unwrap();
            let problem = Problem::new(1, 4, 300, 64, dtypes).with_heads_kv(2, Layout::Bhsd);
            let cases = Cases::of(&problem).unwrap();
            for (style, draws) in [(Style::Saturated, 1), (Style::BadFactors, 4)] {
                let of_style = cases.0.iter().filter(|case| case.name.starts_with(style.name()));
                assert_eq!(of_style.count(), draws, "{}", style.name());
            }
            assert_eq!(cases.judge(&CpuPlan::for_problem(&problem)).unwrap().0, [""; 0], "{dtypes}");
        }
    }

    #[test]
    fn so_do_plans_that_nobody_would_choose() {
        let problem = Problem::new(1, 4, 70, 40, DType::F32).with_heads_kv(2, Layout::Bhsd);
        let cases = Cases::of(&problem).unwrap();
        let isa = Isa::available().into_iter().find(|isa| isa.has_dims()).unwrap_or(Isa::Portable);
        for (lanes, splits, block_kv) in [(Lanes::Dims, 1, 16), (Lanes::Dims, 4, 64), (Lanes::Queries, 3, 24)]
        {
            let plan = CpuPlan { lanes, splits, ..CpuPlan::widest(isa, 2, 48, block_kv) };
            assert_eq!(cases.judge(&plan).unwrap().0, [""; 0], "{plan:?}");
        }
    }
}
