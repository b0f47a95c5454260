//! Keys and values that go to slots of a cache, as engines hand them over.

use cpu::Executor;
use kernels::cache::{CacheWrite, RowPlaces};
use problem::{DType, ElementType};

use super::device::{DeviceWork, aligned, float, head_rows};
use super::rotary::{check_rows, check_shape};
use super::rows::{NewRow, RowWrite};
use super::{On, Queue, Ready, Tensor, View};
use crate::AttentionError;
use crate::error::refused;
use crate::gpu::ArrayWork;

/// New keys and values, and the slot of each: its row in the cache, counted over all pages.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct SlotWrite {
    /// New keys, `[1, head, row, head_dim]`. Rows beyond the slots are padding.
    pub keys: Tensor,
    /// New values, as the keys, with `head_dim_v`.
    pub values: Tensor,
    /// The keys of the cache, `[page, head, row, head_dim]`, with any strides.
    pub key_cache: Tensor,
    /// The values of the cache.
    pub value_cache: Tensor,
    /// The address of the slots. A negative slot is left out.
    pub slots: u64,
    /// The number of slots.
    pub count: usize,
    /// Whether slots are 64-bit integers, and not 32-bit integers.
    pub wide: bool,
    /// For 8-bit caches, the descale factors of K and of V, `[1]` or `[head]`, f32: an element is divided by
    /// its factor and rounded.
    pub factors: Option<[Tensor; 2]>,
}

/// Checks a write of keys and values to their slots, and finds or makes its kernel on a GPU.
/// [`Ready::enqueue`] writes them, and rounds them to 8-bit caches. In host memory, a slot outside of the
/// cache is an error, and nothing is written. On a GPU it is left out. Of rows with one slot the last is
/// kept, on a GPU any.
///
/// # Errors
/// When shapes, types or addresses do not fit, and when the device fails.
pub fn prepare_slots<'a>(queue: Queue<'a>, write: &SlotWrite) -> Result<Ready<'a>, AttentionError> {
    write.check()?;
    let is_empty =
        write.count == 0 || write.key_cache.view.elements() + write.value_cache.view.elements() == 0;
    let on = match queue {
        _ if is_empty => On::Nothing,
        Queue::Host { executor, .. } => On::HostSlots { executor, write: *write },
        Queue::Stream { gpu, handle } => {
            let write =
                DeviceWork::new(gpu, &ArrayWork::Write(write.on_device()), |name| write.address(name))?;
            On::StreamSlots { gpu, handle, write }
        }
    };
    Ok(Ready { memory: super::Memory::new(), on })
}

/// [`prepare_slots`] and [`Ready::enqueue`] in one call.
///
/// # Errors
/// As these.
///
/// # Safety
/// As [`Ready::enqueue`], of all tensors of the write.
pub unsafe fn write_slots(queue: Queue<'_>, write: &SlotWrite) -> Result<(), AttentionError> {
    // SAFETY: this function's own contract.
    unsafe { prepare_slots(queue, write)?.enqueue() }
}

impl SlotWrite {
    fn check(&self) -> Result<(), AttentionError> {
        let [pages, heads, rows, _] = self.key_cache.view.shape;
        let new = self.keys.view.shape[2];
        let (from, to) = (self.keys.view.dtype, self.key_cache.view.dtype);
        if !matches!(from, ElementType::F16 | ElementType::Bf16 | ElementType::F32) {
            let expected = "f16, bf16 or f32".to_owned();
            return Err(refused("key", "element type", from.to_string(), expected));
        }
        let is_eight = matches!(to, ElementType::E4m3 | ElementType::E5m2);
        if to != from && !is_eight {
            let expected = format!("{from}, that of key, e4m3 or e5m2");
            return Err(refused("key_cache", "element type", to.to_string(), expected));
        }
        if is_eight != self.factors.is_some() {
            let value = if is_eight { "none" } else { "some" }.to_owned();
            let expected = "factors for 8-bit caches, and for no other".to_owned();
            return Err(refused("k_scale and v_scale", "number", value, expected));
        }
        for (names, new_rows, cache) in [
            (["key", "key_cache"], &self.keys, &self.key_cache),
            (["value", "value_cache"], &self.values, &self.value_cache),
        ] {
            let dim = cache.view.shape[3];
            check_rows(names[0], new_rows, from)?;
            check_rows(names[1], cache, to)?;
            check_shape(names[0], &new_rows.view, &[1, heads, new, dim])?;
            check_shape(names[1], &cache.view, &[pages, heads, rows, dim])?;
        }
        if self.count > new {
            let expected = format!("{new} at most, the rows of key");
            return Err(refused("slot_mapping", "number of elements", self.count.to_string(), expected));
        }
        for (argument, factors) in ["k_scale", "v_scale"].into_iter().zip(self.factors.iter().flatten()) {
            if factors.view.dtype != ElementType::F32
                || ![&[1][..], &[heads][..]].contains(&factors.view.shape())
            {
                let value = format!("{:?} of {}", factors.view.shape(), factors.view.dtype);
                return Err(refused(argument, "shape", value, format!("[1] or [{heads}] of f32")));
            }
        }
        Ok(())
    }

    /// The new rows that have a slot.
    fn rows(&self) -> [Tensor; 2] {
        [self.keys, self.values].map(|mut tensor| {
            tensor.view.shape[2] = self.count;
            tensor
        })
    }

    /// The factors as `[batch, kv_head]`, one entry for all rows.
    fn factors(&self) -> Option<[Tensor; 2]> {
        let wide = |factors: Tensor| {
            let stride = if factors.view.shape[0] == 1 { 0 } else { factors.view.strides[0] };
            let heads = self.keys.view.shape[1];
            let view =
                View { dimensions: 2, shape: [1, heads, 1, 1], strides: [0, stride, 0, 0], ..factors.view };
            Tensor { view, ..factors }
        };
        self.factors.map(|factors| factors.map(wide))
    }

    /// # Safety
    /// As [`Ready::enqueue`], of all tensors of the write.
    pub(super) unsafe fn on_host(&self, executor: Option<&dyn Executor>) -> Result<(), AttentionError> {
        let [pages, _, page_rows, _] = self.key_cache.view.shape;
        let most = pages.saturating_mul(page_rows);
        let mut rows = Vec::with_capacity(self.count);
        for (index, slot) in (0..self.count).map(|index| {
            let start = self.slots as usize;
            // SAFETY: the slots lie there, by the caller's contract; reads need no alignment.
            let slot = unsafe {
                match self.wide {
                    true => std::ptr::with_exposed_provenance::<i64>(start).add(index).read_unaligned(),
                    false => {
                        std::ptr::with_exposed_provenance::<i32>(start).add(index).read_unaligned().into()
                    }
                }
            };
            (index, slot)
        }) {
            let Ok(place) = usize::try_from(slot) else { continue };
            if place >= most {
                let expected = format!("below {most}, the rows of the cache, or negative at index {index}");
                return Err(refused("slot_mapping", "slot", slot.to_string(), expected));
            }
            let to = [place / page_rows, place % page_rows];
            rows.push(NewRow { from: [0, index], to, sequence: 0, position: 0 });
        }
        let [keys, values] = &self.rows();
        let write = RowWrite {
            new: [keys, values],
            caches: [&self.key_cache, &self.value_cache],
            rotary: None,
            factors: self.factors().map_or([None; 2], |factors| factors.map(Some)),
        };
        // SAFETY: this function's own contract; `check` has compared types and shapes.
        unsafe { write.run(executor, &rows) };
        Ok(())
    }

    fn on_device(&self) -> CacheWrite {
        let [keys, values] = self.rows();
        let of_factors = |factors: Tensor| [0, factors.view.strides[1]];
        CacheWrite {
            from: float(&keys),
            to: match self.key_cache.view.dtype {
                ElementType::E4m3 => DType::E4m3,
                ElementType::E5m2 => DType::E5m2,
                _ => float(&keys),
            },
            new: [head_rows(&keys), head_rows(&values)],
            caches: [head_rows(&self.key_cache), head_rows(&self.value_cache)],
            places: RowPlaces::Slots { wide: self.wide },
            rotation: None,
            factors: self.factors().map_or([None; 2], |factors| factors.map(of_factors).map(Some)),
            aligned: aligned([&keys, &values, &self.key_cache, &self.value_cache]),
        }
    }

    fn address(&self, name: &str) -> Option<u64> {
        match name {
            "k_new" => Some(self.keys.address),
            "v_new" => Some(self.values.address),
            "k" => Some(self.key_cache.address),
            "v" => Some(self.value_cache.address),
            "slots" => Some(self.slots),
            "k_descale" => self.factors.map(|[k, _]| k.address),
            _ => self.factors.map(|[_, v]| v.address),
        }
    }
}
