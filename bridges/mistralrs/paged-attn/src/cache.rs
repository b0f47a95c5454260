//! The rows of a cache: views of blocks, and the write of new rows.
#![allow(unsafe_code, reason = "FlashCore takes addresses")]

use std::borrow::Cow;

#[cfg(feature = "cuda")]
use candle::CudaStorage;
use candle::{CpuStorage, DType, Error, InplaceOp1, Layout, Result, Storage, Tensor, bail};
use flashcore::ElementType;
use flashcore::raw::{self, SlotWrite, View};

use crate::memory::{Memory, on_queue};
use crate::op::rows;
use crate::side::with_dense_rows;

/// Keys and values of a standard cache as `[block, row, head, dim]`, in the caches' own memory.
pub(crate) fn standard(key_cache: &Tensor, value_cache: &Tensor) -> Result<[Tensor; 2]> {
    if key_cache.rank() != 5 || value_cache.rank() != 4 {
        let (keys, values) = (key_cache.shape(), value_cache.shape());
        bail!("key_cache must be of rank 5 and value_cache of rank 4, got {keys:?} and {values:?}")
    }
    let (blocks, heads, parts, page, x) = key_cache.dims5()?;
    let (value_blocks, value_heads, dim, value_page) = value_cache.dims4()?;
    if (blocks, heads, page) != (value_blocks, value_heads, value_page) {
        let (keys, values) = (key_cache.shape(), value_cache.shape());
        bail!("shape mismatch key_cache {keys:?} and value_cache {values:?}")
    }
    let keys = in_place("key_cache", key_cache, &[blocks, page, heads, parts * x])?;
    Ok([keys, in_place("value_cache", value_cache, &[blocks, page, heads, dim])?])
}

/// The tensor's memory in another shape.
pub(crate) fn in_place(name: &str, tensor: &Tensor, shape: &[usize]) -> Result<Tensor> {
    if !tensor.is_contiguous() {
        bail!("{name} must be contiguous, got strides {:?}", tensor.stride())
    }
    tensor.reshape(shape)
}

/// The write of new rows `[token, head, dim]` to slots of caches `[block, row, head, dim]`.
pub(crate) struct RowWrite {
    pub new: [Tensor; 2],
    pub caches: [Tensor; 2],
    pub slots: Tensor,
    /// Factors of caches in 8 bits, one element or one for each head.
    pub factors: Option<[Tensor; 2]>,
}

const NAMES: [&str; 2] = ["key_cache", "value_cache"];

impl RowWrite {
    pub fn run(mut self) -> Result<()> {
        let [k, v] = [&self.new[0], &self.new[1]].map(|rows| rows.dims3());
        let ((tokens, ..), (values, ..)) = (k?, v?);
        if values != tokens {
            let [k, v] = [self.new[0].shape(), self.new[1].shape()];
            bail!("shape mismatch k {k:?} and v {v:?}")
        }
        if self.slots.dims() != [tokens] {
            bail!("shape mismatch slot_mapping {:?}, expected {:?}", self.slots.shape(), [tokens])
        }
        if !matches!(self.slots.dtype(), DType::I64 | DType::U32 | DType::I32) {
            bail!("slot_mapping must be i64, u32 or i32, got {:?}", self.slots.dtype())
        }
        self.slots = self.slots.contiguous()?;
        let [k, v] = [0, 1].map(|i| with_dense_rows(&self.new[i]).map(Cow::into_owned));
        self.new = [k?, v?];
        self.check_storages()?;
        self.caches[0].inplace_op1(&KeyCache(&self))
    }

    fn inputs(&self) -> impl Iterator<Item = &Tensor> {
        self.new.iter().chain([&self.slots]).chain(self.factors.iter().flatten())
    }

    /// Rejects a cache whose storage another tensor of the call has: candle locks a storage that is written.
    fn check_storages(&self) -> Result<()> {
        let storage = |tensor: &Tensor| std::ptr::from_ref::<Storage>(&tensor.storage_and_layout().0);
        let [keys, values] = [storage(&self.caches[0]), storage(&self.caches[1])];
        for (name, cache) in NAMES.into_iter().zip([keys, values]) {
            if keys == values || self.inputs().any(|input| storage(input) == cache) {
                bail!("{name} shares its storage with another tensor of the call")
            }
        }
        Ok(())
    }

    /// Writes into the caches, whose addresses are given: `values` is the storage of the values.
    fn write<S: Memory>(&self, keys: u64, values: &mut S, layout: &Layout) -> Result<()> {
        let storages: Vec<_> = self.inputs().map(|input| input.storage_and_layout()).collect();
        let mut inputs = Vec::with_capacity(storages.len());
        for (storage, layout) in &storages {
            let Some(storage) = S::of(storage).filter(|storage| storage.is_beside(values)) else {
                bail!("key, value, slot_mapping and scales must be on the device of the caches")
            };
            inputs.push((storage, *layout));
        }
        let stream = values.stream();
        let value_type = values.dtype();
        let (value_cache, _guard) = at(values.address_mut(&stream)?, value_type, layout);
        let mut guards = Vec::with_capacity(inputs.len());
        let mut addresses = Vec::with_capacity(inputs.len());
        for (storage, layout) in &inputs {
            let (address, guard) = at(storage.address(&stream)?, storage.dtype(), layout);
            guards.push(guard);
            addresses.push(address);
        }
        let new = |i: usize| {
            let (storage, layout) = inputs[i];
            Ok::<_, Error>(raw::Tensor { address: addresses[i], view: rows(storage.dtype(), layout)? })
        };
        let cache = |i: usize, address| {
            let view = rows(self.caches[i].dtype(), self.caches[i].layout())?;
            Ok::<_, Error>(raw::Tensor { address, view })
        };
        let factor = |i: usize| {
            let view = View::dense(ElementType::F32, inputs[i].1.dims()).map_err(Error::wrap)?;
            Ok::<_, Error>(raw::Tensor { address: addresses[i], view })
        };
        let write = SlotWrite {
            keys: new(0)?,
            values: new(1)?,
            key_cache: cache(0, keys)?,
            value_cache: cache(1, value_cache)?,
            slots: addresses[2],
            count: self.slots.elem_count(),
            wide: self.slots.dtype() == DType::I64,
            factors: self.factors.is_some().then(|| Ok::<_, Error>([factor(3)?, factor(4)?])).transpose()?,
        };
        on_queue(inputs[0].0, &stream, |queue| {
            // SAFETY: candle's layouts describe elements within their storages. Inputs are borrowed, both
            // caches are locked for writing, and `check_storages` has found that no other tensor has their
            // storages. On a GPU, the guards order other work on the storages.
            unsafe { raw::write_slots(queue, &write) }.map_err(Error::wrap)
        })
    }
}

/// The address of the first element of a layout.
fn at<G>((start, guard): (u64, G), dtype: DType, layout: &Layout) -> (u64, G) {
    (start + (layout.start_offset() * dtype.size_in_bytes()) as u64, guard)
}

/// The write, with the storage of the keys.
struct KeyCache<'a>(&'a RowWrite);

/// The write, with the address of the keys and the storage of the values.
struct ValueCache<'a>(&'a RowWrite, u64);

impl KeyCache<'_> {
    fn run<S: Memory>(&self, storage: &mut S, layout: &Layout) -> Result<()> {
        let (stream, dtype) = (storage.stream(), storage.dtype());
        let (address, _guard) = at(storage.address_mut(&stream)?, dtype, layout);
        self.0.caches[1].inplace_op1(&ValueCache(self.0, address))
    }
}

impl InplaceOp1 for KeyCache<'_> {
    fn name(&self) -> &'static str {
        "reshape-and-cache"
    }

    fn cpu_fwd(&self, storage: &mut CpuStorage, layout: &Layout) -> Result<()> {
        self.run(storage, layout)
    }

    #[cfg(feature = "cuda")]
    fn cuda_fwd(&self, storage: &mut CudaStorage, layout: &Layout) -> Result<()> {
        self.run(storage, layout)
    }
}

impl InplaceOp1 for ValueCache<'_> {
    fn name(&self) -> &'static str {
        "reshape-and-cache"
    }

    fn cpu_fwd(&self, storage: &mut CpuStorage, layout: &Layout) -> Result<()> {
        self.0.write(self.1, storage, layout)
    }

    #[cfg(feature = "cuda")]
    fn cuda_fwd(&self, storage: &mut CudaStorage, layout: &Layout) -> Result<()> {
        self.0.write(self.1, storage, layout)
    }
}
