//! Problems that together reach every branch of a forward family.

use problem::{Band, DType, Layout, Problem, Strides, Tensor};

/// Small problems with every kind of row width, ragged end, mask, group and stride.
pub fn torture() -> Vec<Problem> {
    let mut all = Vec::new();
    for (i, dim) in [8, 32, 40, 64, 72, 80, 96, 128, 136, 192, 248, 256].into_iter().enumerate() {
        let dtype = if i % 2 == 0 { DType::F16 } else { DType::Bf16 };
        for (mask, seq_q, seq_kv) in [
            (Band::FULL, 80, 64),
            (Band::FULL, 70, 133),
            (Band::CAUSAL, 100, 100),
            (Band::CAUSAL, 17, 150),
            (Band::CAUSAL, 90, 37),
            (Band::CAUSAL_TOP_LEFT, 90, 37),
            (Band::CAUSAL_TOP_LEFT, 40, 150),
        ] {
            let mut p = Problem::new(1, 1, seq_q, dim, dtype).with_band(mask);
            p.seq_kv = seq_kv;
            all.push(p.with_layout(Layout::Bhsd));
        }
    }
    let grouped = |mask| {
        let mut p = Problem::new(2, 4, 65, 64, DType::F16).with_band(mask);
        p.seq_kv = 129;
        p.with_heads_kv(2, Layout::Bshd)
    };
    all.extend(Band::NAMED.map(grouped));
    all.extend(
        Band::NAMED
            .map(|mask| Problem::new(1, 2, 33, 64, DType::Bf16).with_band(mask).with_seq_kv(0, Layout::Bhsd)),
    );
    let top_left = |heads, seq_q, seq_kv, dtype| {
        let problem = Problem::new(1, heads, seq_q, 64, dtype).with_band(Band::CAUSAL_TOP_LEFT);
        problem.with_seq_kv(seq_kv, Layout::Bshd)
    };
    // Diagonals that end within a block or at its end, and problems in which most rows see all keys.
    all.extend([
        top_left(1, 1, 90, DType::F16),
        top_left(1, 130, 1, DType::Bf16),
        top_left(2, 100, 64, DType::F16),
        top_left(1, 200, 70, DType::Bf16),
        top_left(4, 66, 65, DType::F16).with_heads_kv(2, Layout::Bhsd),
    ]);
    all.push(Problem::new(1, 1, 1, 64, DType::F16).with_seq_kv(1, Layout::Bhsd));
    all.push(Problem::new(1, 1, 1, 128, DType::Bf16).with_seq_kv(300, Layout::Bhsd));
    all.extend(strided());
    for scale in [0.0, -0.3, 4.0] {
        let mut p = Problem::new(1, 1, 40, 64, DType::F16).with_band(Band::CAUSAL);
        p.score.scale = Some(scale);
        all.push(p);
    }
    let mut wide_values = Problem::new(1, 2, 70, 64, DType::F16);
    wide_values.head_dim_v = 96;
    all.push(wide_values.with_layout(Layout::Bshd));
    let mut narrow_values = Problem::new(1, 2, 70, 72, DType::Bf16);
    narrow_values.head_dim_v = 40;
    all.push(narrow_values.with_layout(Layout::Bhsd));
    all
}

/// Strides that no dense tensor has: padded rows, reversed rows, one row for all, odd strides.
fn strided() -> Vec<Problem> {
    let base = || Problem::new(2, 2, 50, 64, DType::F16);
    let mut padded = base();
    for tensor in Tensor::FORWARD {
        let strides = Strides { batch: 2 * 50 * 96 + 16, head: 50 * 96 + 8, row: 96 };
        padded.set_strides(tensor, strides);
    }
    let mut backwards = base().with_band(Band::CAUSAL);
    backwards.k.row = -64;
    backwards.v.head = -backwards.v.head;
    backwards.out.row = -64;
    // The keys that no row sees come first in memory.
    let mut unseen = base().with_band(Band::CAUSAL_TOP_LEFT).with_seq_kv(90, Layout::Bhsd);
    (unseen.k.row, unseen.v.row) = (-64, -64);
    let mut broadcast = base();
    (broadcast.k.batch, broadcast.v.row, broadcast.q.head) = (0, 0, 0);
    let mut odd = base().with_band(Band::CAUSAL);
    for strides in [&mut odd.q, &mut odd.k, &mut odd.v, &mut odd.out] {
        *strides = Strides { batch: 2 * 50 * 67, head: 50 * 67, row: 67 };
    }
    vec![padded, backwards, unseen, broadcast, odd]
}

/// Keys wider than values, as in DeepSeek's latent attention: both masks, types and layouts, with ragged
/// ends.
#[allow(dead_code, reason = "not every family is tried on them")]
pub fn narrow_values(seq_q: usize, seq_kv: usize) -> Vec<Problem> {
    let problem = |(mask, dtype, layout)| {
        let problem = Problem { head_dim_v: 128, ..Problem::new(1, 2, seq_q, 192, dtype) };
        problem.with_band(mask).with_seq_kv(seq_kv, layout)
    };
    let of_type = |dtype| [Layout::Bhsd, Layout::Bshd].map(|layout| (dtype, layout));
    let laid_out = [DType::F16, DType::Bf16].into_iter().flat_map(of_type);
    laid_out.flat_map(|(dtype, layout)| Band::NAMED.map(|mask| problem((mask, dtype, layout)))).collect()
}
