//! Merges of results over different keys, by addresses.

use cpu::Element;
use driver::StreamRef;
use half::{bf16, f16};
use kernels::merge::StateMerge;
use problem::DType;

use super::Queue;
use super::device::DeviceWork;
use crate::AttentionError;
use crate::error::refused;
use crate::gpu::ArrayWork;
use crate::merge::merge_rows;

/// Results of the same query rows over different keys, which become one.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Merge<'a> {
    /// Element type of all results: f16, bf16 or f32.
    pub dtype: DType,
    /// Batch entries, rows, heads, and elements of a row.
    pub extents: [usize; 4],
    /// The addresses of each part: its rows, dense `[batch, row, head, dim]`, and its LSE (natural
    /// logarithm), dense f32 `[batch, head, row]`. One part or more, on a GPU at most
    /// [`StateMerge::MOST`]. A part whose LSE is −∞ saw no key, and the values of its row have no
    /// influence.
    pub parts: &'a [[u64; 2]],
    /// The addresses of the merged result and of its LSE, in the same layouts.
    pub to: [u64; 2],
}

/// Merges results ([`crate::merge_states`]): in host memory before it returns, or enqueued on the stream.
/// After a first call for the type, the dim and the number of parts, it may be captured in a graph.
///
/// # Errors
/// When the type, the extents, the number of parts or an address is not supported, and when the device fails.
///
/// # Safety
/// As [`super::Ready::enqueue`], of all arrays of the merge.
pub unsafe fn merge_states(queue: Queue<'_>, merge: &Merge<'_>) -> Result<(), AttentionError> {
    if merge.parts.is_empty() {
        return Err(refused("parts", "number", "0".to_owned(), "1 or more".to_owned()));
    }
    if merge.extents.contains(&0) {
        return Ok(());
    }
    match (queue, merge.dtype) {
        (Queue::Stream { gpu, handle }, dtype) => {
            let mut addresses = merge.parts.iter().flatten().chain(&merge.to);
            let low =
                merge.parts.iter().map(|[rows, _]| rows).chain([&merge.to[0]]).fold(0, |all, x| all | x);
            let aligned = 1 << (low / dtype.bytes() as u64).trailing_zeros().min(4);
            let work = StateMerge { dtype, parts: merge.parts.len(), extents: merge.extents, aligned };
            let work = DeviceWork::new(gpu, &ArrayWork::Merge(work), |_| addresses.next().copied())?;
            // SAFETY: the caller vouches for the handle and the arrays.
            unsafe { work.enqueue(StreamRef::from_raw(gpu.context(), handle), |_| Ok(())) }
        }
        // SAFETY: this function's own contract.
        (Queue::Host { .. }, DType::F16) => unsafe { merge.on_host::<f16>() },
        // SAFETY: as above.
        (Queue::Host { .. }, DType::Bf16) => unsafe { merge.on_host::<bf16>() },
        // SAFETY: as above.
        (Queue::Host { .. }, DType::F32) => unsafe { merge.on_host::<f32>() },
        (Queue::Host { .. }, other) => {
            Err(refused("parts", "element type", other.to_string(), "f16, bf16 or f32".to_owned()))
        }
    }
}

impl Merge<'_> {
    /// # Safety
    /// As [`merge_states`], for host memory with elements of `T`.
    unsafe fn on_host<T: Element>(&self) -> Result<(), AttentionError> {
        let [batch, rows, heads, dim] = self.extents;
        let count = batch * rows * heads;
        let check = |address: u64, bytes: usize| {
            let fits = address != 0 && (address as usize).is_multiple_of(bytes);
            let expected = || format!("a multiple of {bytes} that is not 0");
            if fits {
                Ok(address as usize)
            } else {
                Err(refused("parts", "address", format!("{address:#x}"), expected()))
            }
        };
        let mut parts = Vec::with_capacity(self.parts.len());
        for &[values, lse] in self.parts {
            let (values, lse) = (check(values, size_of::<T>())?, check(lse, 4)?);
            // SAFETY: the caller's contract; both addresses are aligned.
            parts.push(unsafe {
                let values =
                    std::slice::from_raw_parts(std::ptr::with_exposed_provenance::<T>(values), count * dim);
                (values, std::slice::from_raw_parts(std::ptr::with_exposed_provenance::<f32>(lse), count))
            });
        }
        let (out, lse) = (check(self.to[0], size_of::<T>())?, check(self.to[1], 4)?);
        // SAFETY: the caller's contract, by which nothing else refers to the results.
        let (out, lse) = unsafe {
            (
                std::slice::from_raw_parts_mut(std::ptr::with_exposed_provenance_mut::<T>(out), count * dim),
                std::slice::from_raw_parts_mut(std::ptr::with_exposed_provenance_mut::<f32>(lse), count),
            )
        };
        let lse_of_row = |row: usize| {
            let (token, head) = (row / heads, row % heads);
            (token / rows * heads + head) * rows + token % rows
        };
        merge_rows(&parts, dim, out, lse, lse_of_row);
        Ok(())
    }
}
