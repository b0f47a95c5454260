//! Writing new rows of K and V into a cache in host memory, on several threads.

use std::collections::HashSet;
use std::sync::atomic::{AtomicUsize, Ordering};

use cpu::{CallingThread, Executor, Pool};
use half::{bf16, f16};
use problem::{E4m3, E5m2, Element, ElementType};

use super::rotary::{Rotary, place};
use super::{Tensor, View};
use crate::cache::rotate;

/// Bytes of a task, so that a thread takes long enough for the wake-up of others to pay.
const TASK: usize = 1 << 16;

/// A new row and its place.
#[derive(Clone, Copy, Debug)]
pub(super) struct NewRow {
    /// The entry and the row of the new tensors.
    pub from: [usize; 2],
    /// The entry and the row of the caches.
    pub to: [usize; 2],
    /// The sequence, to which descale factors belong.
    pub sequence: usize,
    /// The row of the tables of the rotation.
    pub position: usize,
}

/// A write of rows: from tensors `[entry, head, row, dim]` into caches of such dimensions.
pub(super) struct RowWrite<'a> {
    /// New keys and values.
    pub new: [&'a Tensor; 2],
    /// The caches of keys and values.
    pub caches: [&'a Tensor; 2],
    /// The rotation of the keys.
    pub rotary: Option<&'a Rotary>,
    /// The descale factors of 8-bit caches, `[batch, kv_head]`.
    pub factors: [Option<Tensor>; 2],
}

impl RowWrite<'_> {
    /// Writes the rows. Of rows with one place, the last is kept.
    ///
    /// # Safety
    /// The tensors have the rows, and the tables the positions; only this call uses the caches. The element
    /// types are those that [`super::append::Append`] and [`super::SlotWrite`] accept.
    pub(super) unsafe fn run(&self, executor: Option<&dyn Executor>, rows: &[NewRow]) {
        let [keys, _] = self.new;
        macro_rules! run {
            ($($from:pat => $element:ty),*) => {
                match (keys.view.dtype, self.caches[0].view.dtype) {
                    $(
                        // SAFETY: this function's own contract.
                        ($from, ElementType::E4m3) => unsafe { self.all::<$element, E4m3>(executor, rows) },
                        // SAFETY: as above.
                        ($from, ElementType::E5m2) => unsafe { self.all::<$element, E5m2>(executor, rows) },
                        // SAFETY: as above.
                        ($from, _) => unsafe { self.all::<$element, $element>(executor, rows) },
                    )*
                    _ => {} // refused by the checks
                }
            };
        }
        run!(ElementType::F16 => f16, ElementType::Bf16 => bf16, ElementType::F32 => f32);
    }

    /// # Safety
    /// As [`RowWrite::run`], for new elements of type `T` and caches of type `C`.
    unsafe fn all<T: Element, C: Element>(&self, executor: Option<&dyn Executor>, rows: &[NewRow]) {
        let mut seen = HashSet::with_capacity(rows.len());
        let mut last: Vec<NewRow> = rows.iter().rev().copied().filter(|row| seen.insert(row.to)).collect();
        last.reverse();
        let bytes: usize = self.new.iter().map(|tensor| tensor.view.shape[1] * tensor.view.shape[3]).sum();
        let of_task = (TASK / (bytes * size_of::<T>()).max(1)).max(1);
        let tasks = last.len().div_ceil(of_task);
        let next = AtomicUsize::new(0);
        let work = || {
            let mut angles = Vec::new();
            while let Some(task) = Some(next.fetch_add(1, Ordering::Relaxed)).filter(|&task| task < tasks) {
                for row in &last[task * of_task..last.len().min((task + 1) * of_task)] {
                    // SAFETY: the caller's contract. Rows have different places, which share no memory, or
                    // one thread writes all of them.
                    unsafe { self.row::<T, C>(row, &mut angles) };
                }
            }
        };
        let is_apart = self.caches.iter().all(|cache| rows_are_apart(&cache.view));
        if tasks <= 1 || !is_apart {
            return work();
        }
        let shared = if executor.is_none() { Pool::shared() } else { None };
        let executor = executor.or_else(|| shared.as_deref().map(|pool| pool as &dyn Executor));
        let executor = executor.unwrap_or(&CallingThread);
        executor.run(executor.threads().min(tasks), &work);
    }

    /// Writes a row of all heads.
    ///
    /// # Safety
    /// As [`RowWrite::all`].
    unsafe fn row<T: Element, C: Element>(&self, row: &NewRow, angles: &mut Vec<f32>) {
        if let Some(rotary) = self.rotary {
            // SAFETY: the caller's contract.
            unsafe { rotary.angles(row.position, angles) };
        }
        let [from, to] = [row.from, row.to];
        for (i, (new, cache)) in self.new.into_iter().zip(self.caches).enumerate() {
            for head in 0..new.view.shape[1] {
                let rotary = self.rotary.filter(|_| i == 0);
                // SAFETY: the caller's contract: these are rows of the tensors, of types `T` and `C`, and
                // the cache is another memory than the new rows.
                unsafe {
                    let elements = new.view.shape[3];
                    let new = std::slice::from_raw_parts(place::<T>(new, [from[0], head, from[1]]), elements);
                    let cache = place::<C>(cache, [to[0], head, to[1]]);
                    if rotary.is_none() && T::DTYPE == C::DTYPE {
                        cache.cast::<T>().copy_from_nonoverlapping(new.as_ptr(), elements);
                        continue;
                    }
                    let mut wide: Vec<f32> = new.iter().map(|x| x.to_f32()).collect();
                    if let Some(rotary) = rotary {
                        let (cos, sin) = angles.split_at(angles.len() / 2);
                        rotate(&mut wide, cos, sin, rotary.interleaved);
                    }
                    if let Some(factors) = &self.factors[i] {
                        let factor = factor(factors, row.sequence, head);
                        wide.iter_mut().for_each(|x| *x /= factor);
                    }
                    for (index, &x) in wide.iter().enumerate() {
                        cache.add(index).write(C::from_f32(x));
                    }
                }
            }
        }
    }
}

/// The descale factor of a head of a sequence.
///
/// # Safety
/// The factors `[batch, kv_head]` have the element.
unsafe fn factor(factors: &Tensor, sequence: usize, head: usize) -> f32 {
    let [of_sequence, of_head, ..] = factors.view.strides;
    let offset = sequence as i64 * of_sequence + head as i64 * of_head;
    let start: *const f32 = std::ptr::with_exposed_provenance(factors.address as usize);
    // SAFETY: the caller's contract.
    unsafe { start.offset(offset as isize).read() }
}

/// Whether different rows have no element in common, as far as nested strides show.
fn rows_are_apart(view: &View) -> bool {
    let mut dims: Vec<(u64, u64)> = (view.shape.iter().zip(&view.strides))
        .filter(|(extent, _)| **extent > 1)
        .map(|(&extent, &stride)| (stride.unsigned_abs(), extent as u64))
        .collect();
    dims.sort_unstable();
    let mut reach = 1;
    dims.into_iter().all(|(stride, extent)| {
        let fits = stride >= reach;
        reach = stride.saturating_mul(extent);
        fits
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_strides_that_nest_keep_rows_apart() {
        let apart = |strides: [i64; 4]| {
            rows_are_apart(&View::new(ElementType::F16, &[3, 2, 5, 8], &strides).unwrap())
        };
        assert!(apart([80, 40, 8, 1]) && apart([80, 8, 16, 1]) && apart([-80, 8, 16, 1]));
        assert!(!apart([0, 40, 8, 1]) && !apart([80, 40, 4, 1]) && !apart([79, 40, 8, 1]));
    }
}
