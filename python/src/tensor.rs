//! Tensors as the package describes them, and the problem that four tensors define.

use problem::{Band, Corner, DTypes, Problem, ProblemError, Score, Strides};

use crate::error::Error;
use crate::features::Features;

/// Address of element (0, 0, 0, 0), shape and strides in elements, both in the order batch, head, sequence,
/// dim.
pub type Described = (usize, [usize; 4], [i64; 4]);

/// What changes the answer besides the tensors: whether the band is aligned to the top left, the keys that a
/// query sees before and after the one level with it (−1: all), the factor on Q Kᵀ, and the cap on the logits
/// (0: none).
pub type Terms = (bool, i64, i64, Option<f32>, f64);

/// The problem of the tensors `q`, `k`, `v` and `out`. Packed tensors have batch extent 1.
///
/// # Errors
/// When shapes do not fit each other, the last dimension is not contiguous, or the problem is invalid. A
/// problem without batches, heads or rows is valid (see [`is_empty`]).
pub fn problem_of(
    [q, k, v, out]: [&Described; 4],
    dtypes: impl Into<DTypes>,
    (band, score): (Band, Score),
    features: Option<&Features>,
) -> Result<Problem, Error> {
    let packed = features.map_or([false; 2], Features::packed);
    // The batch extents of packed tensors are checked later.
    let of_q = if packed == [false; 2] { ("q", q.1[0]) } else { ("k", k.1[0]) };
    let pairs = [
        ("k", "batch", k.1[0], of_q.0, of_q.1),
        ("v", "batch", v.1[0], "k", k.1[0]),
        ("k", "head_dim", k.1[3], "q", q.1[3]),
        ("v", "heads", v.1[1], "k", k.1[1]),
        ("v", "sequence length", v.1[2], "k", k.1[2]),
        ("out", "batch", out.1[0], "q", q.1[0]),
        ("out", "heads", out.1[1], "q", q.1[1]),
        ("out", "sequence length", out.1[2], "q", q.1[2]),
        ("out", "head_dim", out.1[3], "v", v.1[3]),
    ];
    for (tensor, what, value, other, expected) in pairs {
        if value != expected {
            let message =
                format!("{tensor} has {what} = {value}, but {other} has {expected}; they must be equal");
            return Err(Error::Argument(message));
        }
    }
    let mut problem = Problem {
        heads_kv: k.1[1],
        seq_kv: k.1[2],
        head_dim_v: v.1[3],
        band,
        score,
        q: strides("q", q)?,
        k: strides("k", k)?,
        v: strides("v", v)?,
        out: strides("out", out)?,
        ..Problem::new(q.1[0], q.1[1], q.1[2], q.1[3], dtypes)
    };
    if let Some(features) = features {
        features.apply(&mut problem)?;
    }
    check_batch(&problem, [("q", q.1[0]), ("k", k.1[0])], packed)?;
    problem.with_a_row().check()?;
    Ok(problem)
}

/// Rejects tensors whose batch extent differs from the problem's; packed tensors must have a batch extent of
/// 1.
fn check_batch(problem: &Problem, tensors: [(&str, usize); 2], packed: [bool; 2]) -> Result<(), Error> {
    for ((tensor, batch), packed) in tensors.into_iter().zip(packed) {
        let expected = if packed { 1 } else { problem.batch };
        if batch != expected {
            let why =
                if packed { ", since cu_seqlens packs all sequences" } else { ", the number of sequences" };
            let message =
                format!("invalid value '{batch}' for the batch of {tensor}: expected {expected}{why}");
            return Err(Error::Argument(message));
        }
    }
    Ok(())
}

/// The band and the score of a call.
///
/// # Errors
/// When a bound of the band is not a valid number of keys, or the cap is not positive in f32.
pub fn band_and_score((top_left, before, after, scale, cap): Terms) -> Result<(Band, Score), Error> {
    let corner = if top_left { Corner::TopLeft } else { Corner::BottomRight };
    let band = Band { corner, before: bound("before", before)?, after: bound("after", after)? };
    // A cap that is too small for f32 is not "no cap".
    let softcap = (cap != 0.0).then_some(cap as f32);
    if softcap.is_some_and(|cap| !(cap > 0.0 && cap.is_finite())) {
        return Err(ProblemError::Softcap { value: cap.to_string() }.into());
    }
    Ok((band.aligned(corner), Score { scale, softcap, sink: false }))
}

fn bound(name: &str, keys: i64) -> Result<Option<u32>, Error> {
    if keys == -1 {
        return Ok(None);
    }
    let expected = || format!("-1 (all keys) to {}", u32::MAX);
    u32::try_from(keys).map(Some).map_err(|_| Error::invalid(name, &keys.to_string(), &expected()))
}

/// The strides of the rows of a tensor. The last dimension must be contiguous.
pub fn strides(name: &str, &(_, shape, [batch, head, row, dim]): &Described) -> Result<Strides, Error> {
    if dim != 1 && shape[3] > 1 && !shape.contains(&0) {
        let message = format!("{name}'s last dimension has stride {dim}; it must be contiguous (stride 1)");
        return Err(Error::Argument(message));
    }
    Ok(Strides { batch, head, row })
}
