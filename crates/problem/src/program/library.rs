//! Well-known score and mask programs, each one line of [`Expr`].

use super::{Expr, Input, UnaryOp};

/// The input score: the logit after the scale and the softcap.
pub fn score() -> Expr {
    Expr::input(Input::Score)
}

/// The query's position.
pub fn query() -> Expr {
    Expr::input(Input::Query)
}

/// The key's position.
pub fn key() -> Expr {
    Expr::input(Input::Key)
}

/// The batch entry.
pub fn batch() -> Expr {
    Expr::input(Input::Batch)
}

/// The query head.
pub fn head() -> Expr {
    Expr::input(Input::Head)
}

/// The number of queries of the sequence.
pub fn query_length() -> Expr {
    Expr::input(Input::QueryLength)
}

/// The number of keys of the sequence.
pub fn key_length() -> Expr {
    Expr::input(Input::KeyLength)
}

/// The position of the key that is level with the query in a bottom-right band.
pub fn level() -> Expr {
    query() + key_length() - query_length()
}

/// Float parameter `i`.
pub fn float(i: u32) -> Expr {
    Expr::input(Input::FloatParameter(i))
}

/// Integer parameter `i`.
pub fn int(i: u32) -> Expr {
    Expr::input(Input::IntParameter(i))
}

/// A mask: keys up to the query, aligned to the bottom right.
pub fn causal() -> Expr {
    level().ge(key())
}

/// A mask: `before` keys before the level key, and `after` keys after it (both inclusive).
pub fn window(before: impl Into<Expr>, after: impl Into<Expr>) -> Expr {
    (level() - key()).le(before) & (key() - level()).le(after)
}

/// A mask: keys in the query's chunk of `length` positions, up to the query (Llama 4).
pub fn chunk(length: impl Into<Expr> + Clone) -> Expr {
    causal() & (level() / length.clone()).eq(key() / length)
}

/// A mask: causal, and every query sees the first `length` keys (prefix LM).
pub fn prefix(length: impl Into<Expr>) -> Expr {
    causal() | key().lt(length)
}

/// A mask: query and key belong to one document. Integer table `table` holds the document of each
/// position, `[batch, position]`.
pub fn document(table: u32) -> Expr {
    let of = |position: Expr| Expr::load(table, false, [batch(), position]);
    of(query()).eq(of(key()))
}

/// A mask: the level key and every `step`-th key before and after it. Join it with [`causal`] or [`window`]
/// for a dilated window.
pub fn dilated(step: impl Into<Expr>) -> Expr {
    ((level() - key()) % step).eq(0)
}

/// A mask: query and key lie in the same block of `length` positions.
pub fn block_diagonal(length: impl Into<Expr> + Clone) -> Expr {
    (query() / length.clone()).eq(key() / length)
}

/// A mask for speculative decoding: the last `q_len` keys are a tree of drafts. Bit `j` of integer table
/// `table`, `[query]`, says whether query `i` sees draft `j`. Earlier keys are all visible.
pub fn tree(table: u32) -> Expr {
    let draft = key() - (key_length() - query_length());
    let bits = Expr::load(table, false, [query()]);
    draft.clone().lt(0) | ((bits >> draft.max(0)) & 1).ne(0)
}

/// A mask: integer table `table`, `[batch, head, query, key]`, is not zero. Strides of 0 broadcast.
pub fn mask_tensor(table: u32) -> Expr {
    Expr::load(table, false, [batch(), head(), query(), key()]).ne(0)
}

/// A score: ALiBi (Press et al. 2021), `s − slope · |level − key|`. Float table `table` holds a slope per
/// `[batch, head]`; a batch stride of 0 shares them.
pub fn alibi(table: u32) -> Expr {
    score() - Expr::load(table, true, [batch(), head()]) * (level() - key()).abs()
}

/// A score: `s + bias`. Float table `table` is `[batch, head, query, key]`; strides of 0 broadcast.
pub fn bias(table: u32) -> Expr {
    score() + Expr::load(table, true, [batch(), head(), query(), key()])
}

/// A score: `s + bias[h, q − k + offset]`, with the index clamped to the table (relative positions).
pub fn relative_bias(table: u32, offset: impl Into<Expr>) -> Expr {
    score() + Expr::load(table, true, [head(), query() - key() + offset])
}

/// A score: `s + bias[h, bucket(k − q)]` as in T5 (Raffel et al. 2020). Half of the buckets are exact
/// distances, the others grow logarithmically up to distance `farthest`. `both_sides` splits the buckets
/// between keys before and after the query, as in the encoder.
pub fn t5_bias(table: u32, buckets: i32, farthest: i32, both_sides: bool) -> Expr {
    let offset = key() - query();
    let side = if both_sides { buckets / 2 } else { buckets };
    let (distance, first) = if both_sides {
        (offset.clone().abs(), offset.gt(0).select(side, 0))
    } else {
        ((-offset).max(0), Expr::from(0))
    };
    let exact = side / 2;
    // The bucket is ln(distance / exact) / ln(farthest / exact) · (side − exact), computed with base 2
    // logarithms.
    let per_octave = (f64::from(side - exact) / (f64::from(farthest) / f64::from(exact)).log2()) as f32;
    let ratio = distance.clone().max(1).unary(UnaryOp::ToFloat) * (1.0 / exact as f32);
    let far = (ratio.unary(UnaryOp::Log2) * per_octave).unary(UnaryOp::ToInt).max(0);
    let far = (far + exact).min(side - 1);
    let bucket = first + distance.clone().lt(exact).select(distance, far);
    score() + Expr::load(table, true, [head(), bucket])
}
