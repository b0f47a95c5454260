//! Results over the keys of each rank, as in decoding with a cache that is sharded over ranks.

use cpu::Element;

use super::agree::agree;
use super::collectives::expect;
use super::rows::from_bytes;
use super::{Collectives, GroupError};
use crate::{AttentionError, Output, merge_states};

/// Merges the results of the same queries over the keys of each rank into the result over all keys: for
/// decoding with caches of which each rank holds some keys of each sequence. Which rank holds a key does not
/// matter, and a rank may hold none: its LSE is −∞. All ranks get equal bits, because results are merged in
/// the order of ranks. A sink may take part on one rank alone.
///
/// ```
/// use flashcore::parallel::{Collectives, merge_over_group, thread_ranks};
/// use flashcore::{Layout, TensorView, attention};
///
/// let q = [1.0f32; 8];
/// let keys: Vec<f32> = (0..4 * 8).map(|i| (i / 8) as f32).collect(); // two keys on each rank
/// let view = |x, rows| TensorView::dense(x, [1, 1, rows, 8], Layout::Bhsd);
/// let whole = attention(view(&q, 1)?, view(&keys, 4)?, view(&keys, 4)?).run()?;
/// std::thread::scope(|scope| {
///     let ranks = thread_ranks(2, std::time::Duration::from_secs(60)).into_iter().map(|mut group| {
///         let (q, keys, whole) = (&q, &keys, &whole);
///         scope.spawn(move || {
///             let mine = view(&keys[group.rank() * 16..][..16], 2)?;
///             let mut out = attention(view(q, 1)?, mine, mine).run()?;
///             merge_over_group(&mut group, &mut out)?;
///             assert!((out.data[0] - whole.data[0]).abs() < 1e-6);
///             Ok::<(), flashcore::AttentionError>(())
///         })
///     });
///     ranks.collect::<Vec<_>>().into_iter().try_for_each(|rank| rank.join().unwrap())
/// })?;
/// # Ok::<(), flashcore::AttentionError>(())
/// ```
///
/// # Errors
/// When ranks differ in the shape or the type of the result, or the group fails.
pub fn merge_over_group<T: Element>(
    group: &mut dyn Collectives,
    output: &mut Output<T>,
) -> Result<(), AttentionError> {
    let Output { data, shape, lse } = output;
    agree(
        group,
        Ok(vec![
            ("the element type of out", T::DTYPE.to_string()),
            ("the shape of out", format!("{shape:?}")),
        ]),
    )?;
    let own = [T::elements(data).bytes(), bytemuck::cast_slice(lse)].concat();
    let parts = group.all_gather(&own)?;
    let read = |(from, message): (usize, &Vec<u8>)| {
        expect(message, own.len(), from)?;
        let (out, lses) = message.split_at(size_of_val(&data[..]));
        Ok((from_bytes::<T>(out, data.len(), from)?, from_bytes::<f32>(lses, lse.len(), from)?))
    };
    let parts = parts.iter().enumerate().map(read).collect::<Result<Vec<_>, GroupError>>()?;
    let parts: Vec<_> = parts.iter().map(|(out, lse)| (&out[..], &lse[..])).collect();
    merge_states(&parts, shape[3], data, lse)
}
