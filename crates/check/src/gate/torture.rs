//! Problems whose shape, strides or mask make faulty kernels fail. [`Style`](judge::inputs::Style) has the
//! difficult values.

use problem::program::library;
use problem::{
    Band, DTypes, ElementType, Expr, Layout, Lengths, Problem, Program, Programs, Score, SideLengths,
    Strides, Table,
};

/// A problem of the torture set and its difficulty.
#[derive(Clone, Debug, PartialEq)]
pub struct Torture {
    /// The difficulty in a few words.
    pub name: &'static str,
    pub problem: Problem,
}

/// The torture set for element types and a head dim. All problems are small: the difficulty is at their
/// edges.
pub fn problems(dtypes: impl Into<DTypes>, head_dim: usize) -> Vec<Torture> {
    let (layout, dtypes) = (Layout::Bhsd, dtypes.into());
    let dense =
        |seq_q: usize, seq_kv: usize| Problem::new(1, 2, seq_q, head_dim, dtypes).with_seq_kv(seq_kv, layout);
    let causal = |seq_q, seq_kv| dense(seq_q, seq_kv).with_band(Band::CAUSAL);
    let top_left = |seq_q, seq_kv| dense(seq_q, seq_kv).with_band(Band::CAUSAL_TOP_LEFT);
    let set = [
        ("one row, one key", dense(1, 1)),
        ("one row", dense(1, 130)),
        ("one key", dense(70, 1)),
        ("no key", dense(33, 0)),
        ("ragged tails", dense(67, 131)),
        ("one past a tile", dense(129, 65)),
        ("one short of a tile", dense(127, 63)),
        ("more queries than keys", dense(150, 40)),
        ("causal", causal(96, 96)),
        ("causal, ragged", causal(67, 67)),
        ("causal, more keys", causal(37, 101)),
        ("causal, rows that see nothing", causal(101, 37)),
        ("causal, no key", causal(5, 0)),
        ("top left", top_left(67, 67)),
        ("top left, keys that nothing sees", top_left(37, 101)),
        ("top left, rows that see all", top_left(101, 37)),
        ("top left, no key", top_left(5, 0)),
        ("grouped queries", grouped(dense(40, 72))),
        ("[batch, seq, head, dim]", dense(67, 70).with_layout(Layout::Bshd)),
        ("several batches", Problem { batch: 3, ..dense(20, 24) }.with_layout(layout)),
        ("keys broadcast by stride 0", broadcast(dense(40, 50))),
        ("huge strides", spread(dense(9, 11))),
        ("padded rows", padded(dense(40, 50))),
    ];
    set.into_iter()
        .chain(features(dtypes, head_dim))
        .map(|(name, problem)| Torture { name, problem })
        .collect()
}

/// Uneven lengths, sinks, and score and mask programs.
fn features(dtypes: DTypes, head_dim: usize) -> Vec<(&'static str, Problem)> {
    let layout = Layout::Bshd;
    let of_batch = |batch: usize, seq_q: usize, seq_kv: usize| {
        Problem { batch, heads_kv: 1, ..Problem::new(1, 2, seq_q, head_dim, dtypes) }
            .with_seq_kv(seq_kv, layout)
    };
    let base = |seq_q: usize, seq_kv: usize| of_batch(2, seq_q, seq_kv);
    // Three sequences: one has a neighbour on both sides.
    let uneven = |seq_q: usize, seq_kv: usize| of_batch(3, seq_q, seq_kv);
    let packed = |rows| SideLengths { packed: Some(rows), used: false };
    let used = SideLengths { packed: None, used: true };
    let with = |problem: Problem, lengths: Lengths| Problem { lengths, ..problem };
    let both = Lengths { q: packed(150), kv: packed(170), left_padded: false };
    let kv_used = Lengths { kv: used, ..Lengths::EVEN };
    let sink = |mut problem: Problem| {
        problem.score.sink = true;
        problem
    };
    let program = |problem: Problem, score: Option<Expr>, mask: Option<Expr>, tables: Vec<Table>| {
        // Expressions of the library have the right types.
        let compiled = |expr: Option<Expr>| expr.and_then(|expr| Program::new(&expr).ok());
        let programs = Programs {
            score: compiled(score),
            mask: compiled(mask),
            floats: vec![0.7],
            ints: vec![5, 24],
            tables,
        };
        Problem { programs, ..problem }
    };
    let slopes = || vec![Table { dtype: ElementType::F32, extents: vec![2, 2], strides: vec![0, 1] }];
    let one_per_pair = |dtype, rows: usize, keys: usize| {
        // One table for all batch entries and heads.
        let strides = vec![0, 0, keys as i64, 1];
        vec![Table { dtype, extents: vec![2, 2, rows, keys], strides }]
    };
    let window = || library::window(library::int(0), library::int(1));
    // Each operand of the score: in the exponent, before a cap, before a score program.
    let of_heads = Score::OPERANDS.into_iter().flat_map(|operand| {
        let capped = base(100, 100).with_band(Band::window(30, 0)).with_softcap(4.0);
        let biased = program(base(67, 90), Some(library::alibi(0)), Some(library::causal()), slopes());
        [
            (operand.name(), base(67, 131)),
            ("a value per head, softcap, window", capped),
            ("a value per head, ALiBi, causal", biased),
        ]
        .map(|(name, mut problem)| {
            problem.score.set(operand, true);
            (name, problem)
        })
    });
    let set = vec![
        ("packed sequences", with(uneven(70, 90), both)),
        ("packed sequences, causal", with(uneven(70, 90), both).with_band(Band::CAUSAL)),
        ("packed sequences, top left", with(uneven(90, 70), both).with_band(Band::CAUSAL_TOP_LEFT)),
        ("packed sequences, window, sink", sink(with(uneven(70, 90), both).with_band(Band::window(20, 3)))),
        ("used keys", with(uneven(40, 130), kv_used)),
        ("used keys, causal, left padding", {
            let lengths = Lengths { left_padded: true, ..kv_used };
            with(uneven(50, 100), lengths).with_band(Band::CAUSAL)
        }),
        ("used queries of packed sequences", {
            let q = SideLengths { packed: Some(130), used: true };
            with(uneven(60, 60), Lengths { q, kv: used, left_padded: false })
        }),
        ("pages", with(uneven(20, 130), kv_used).with_pages(16, 30)),
        ("pages of one row, causal, left padding", {
            let lengths = Lengths { left_padded: true, ..kv_used };
            with(uneven(30, 70), lengths).with_band(Band::CAUSAL).with_pages(1, 220)
        }),
        ("pages that sequences share, even lengths, one row", uneven(1, 65).with_pages(3, 50)),
        ("chunks of packed sequences in pages, heads before rows", {
            let lengths = Lengths { q: packed(60), ..kv_used };
            let mut problem = with(uneven(40, 300), lengths).with_band(Band::CAUSAL).with_pages(64, 20);
            let strides = |dim: usize| Layout::Bhsd.strides(1, 64, dim);
            (problem.k, problem.v) = (strides(problem.head_dim), strides(problem.head_dim_v));
            problem
        }),
        ("sink, causal, rows that see nothing", sink(base(101, 37).with_band(Band::CAUSAL))),
        ("ALiBi, causal", program(base(67, 90), Some(library::alibi(0)), Some(library::causal()), slopes())),
        ("additive bias", {
            let bias = one_per_pair(ElementType::Bf16, 67, 83);
            program(base(67, 83), Some(library::bias(0)), None, bias)
        }),
        ("additive bias, read in pairs", {
            let bias = one_per_pair(ElementType::F16, 40, 256);
            program(base(40, 256), Some(library::bias(0)), None, bias)
        }),
        ("boolean mask, softcap", {
            let mask = one_per_pair(ElementType::U8, 50, 70);
            program(base(50, 70).with_softcap(3.0), None, Some(library::mask_tensor(0)), mask)
        }),
        ("boolean mask, causal, rows of a tile beyond the queries", {
            let mask = one_per_pair(ElementType::U8, 33, 33);
            program(base(33, 33).with_band(Band::CAUSAL), None, Some(library::mask_tensor(0)), mask)
        }),
        ("boolean mask, causal, a warpgroup beyond the queries", {
            let mask = one_per_pair(ElementType::U8, 100, 100);
            program(base(100, 100).with_band(Band::CAUSAL), None, Some(library::mask_tensor(0)), mask)
        }),
        ("documents, causal", {
            let of_position =
                vec![Table { dtype: ElementType::I32, extents: vec![2, 90], strides: vec![90, 1] }];
            program(base(90, 90), None, Some(library::causal() & library::document(0)), of_position)
        }),
        ("chunks of packed sequences", {
            program(with(uneven(70, 90), both), None, Some(library::chunk(library::int(1))), Vec::new())
        }),
        ("prefix and scaled score, window", {
            let score = library::score() * library::float(0)
                + library::key().binary(problem::program::BinaryOp::Rem, 3);
            program(base(80, 80), Some(score), Some(window() | library::key().lt(4)), Vec::new())
        }),
        ("relative bias of each head, negative scale", {
            let table = vec![Table::dense(ElementType::F32, &[2, 160])];
            let mut problem = program(base(80, 80), Some(library::relative_bias(0, 79)), None, table);
            problem.score.scale = Some(-0.2);
            problem
        }),
    ];
    set.into_iter().chain(of_heads).collect()
}

fn grouped(problem: Problem) -> Problem {
    Problem { heads_q: 6, heads_kv: 2, ..problem }.with_layout(Layout::Bhsd)
}

/// All heads share one head of keys and values (stride 0).
fn broadcast(mut problem: Problem) -> Problem {
    problem.k.head = 0;
    problem.v.head = 0;
    problem
}

/// Rows that are far apart: a kernel that computes offsets in 16 bits, or assumes dense rows, fails.
fn spread(problem: Problem) -> Problem {
    with_row_stride(problem, 65_536 + 8)
}

/// Eight elements of padding between rows.
fn padded(problem: Problem) -> Problem {
    let row = problem.head_dim as i64 + 8;
    with_row_stride(problem, row)
}

fn with_row_stride(mut problem: Problem, row: i64) -> Problem {
    for (strides, rows) in [
        (&mut problem.q, problem.seq_q),
        (&mut problem.k, problem.seq_kv),
        (&mut problem.v, problem.seq_kv),
        (&mut problem.out, problem.seq_q),
    ] {
        *strides = Strides { batch: 0, head: row * rows as i64, row };
    }
    problem
}

#[cfg(test)]
mod tests {
    use super::*;
    use cpu::CpuPlan;
    use judge::inputs::{Style, draw};
    use judge::outputs::References;
    use problem::{DType, Tensor};

    #[test]
    fn every_problem_is_legal_and_the_native_kernels_survive_it() {
        let fp8 = ["e4m3", "e5m2/e4m3/f16"].map(|text| text.parse().unwrap());
        for dtype in DType::OUTPUTS.map(DTypes::uniform).into_iter().chain(fp8) {
            for Torture { name, problem } in problems(dtype, 64) {
                problem.check().unwrap_or_else(|e| panic!("{name}: {e}"));
                let inputs = draw(&problem, Style::PoisonedPadding, 1);
                let (out, lse) = inputs.attention(&problem, &CpuPlan::for_problem(&problem)).unwrap();
                let (_, origin) = problem.span(Tensor::Out).unwrap();
                let mut dense = Vec::new();
                let sequences = inputs.sequences(&problem);
                for (span, h, r) in judge::inputs::rows_of(&sequences, Tensor::Out, problem.heads_q) {
                    let start = origin as i64 + problem.out.offset(span.batch, h, span.start + r);
                    dense.extend((0..64).filter_map(|d| out.get(start as usize + d)).map(f64::from));
                }
                let rows = judge::outputs::dense_rows(&problem, &sequences);
                let lse: Vec<f64> = rows.into_iter().map(|row| f64::from(lse[row])).collect();
                let references = References::of(&problem, &inputs).unwrap();
                let reasons = references.judge(&dense, Some(&lse)).reasons();
                assert_eq!(reasons, [""; 0], "{dtype} {name}");
            }
        }
    }
}
