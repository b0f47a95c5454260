//! Computes the bytes of initial contents.

use std::path::Path;
use std::sync::Arc;

use problem::{DType, Layout, Tensor};
use rand::rngs::SmallRng;
use rand::{Rng, SeedableRng};

use super::memory::{BufferType, Init, Memory, View};
use super::{ArgSpec, LaunchError, LaunchSpec};
use crate::numbers::Numbers;
use crate::reference::ReferenceSource;

/// The bytes of gaps between strided elements: a NaN in every float format, so that a read of a gap shows in
/// the outputs.
const GAP: u8 = 0xff;

/// The contents of memory, drawn from `seed`; `None` for uninitialised memory. `data` are the contents of
/// files, dense.
pub(crate) fn fill(memory: &Memory, seed: u64, data: &[Arc<[u8]>]) -> Option<Vec<u8>> {
    let (dtype, size, view) = (memory.dtype, memory.dtype.bytes(), memory.shaped());
    let mut rng = SmallRng::seed_from_u64(seed);
    let elements = view.len();
    let dense: Vec<u8> = match memory.init {
        Init::Uninitialised => return None,
        Init::Zeros => vec![0; elements * size],
        Init::Iota => (0..elements).flat_map(|i| dtype.encode(i as f64)).collect(),
        Init::Random => (0..elements).flat_map(|_| dtype.encode(dtype.draw(rng.random::<f64>()))).collect(),
        Init::Number(bits) => (0..elements).flat_map(|_| bits.to_le_bytes().into_iter().take(size)).collect(),
        Init::Integers { low, high } => (0..elements)
            .flat_map(|_| {
                let value = rng.random_range(low..=high);
                if dtype.is_float() {
                    dtype.encode(value as f64)
                } else {
                    value.to_le_bytes()[..size].to_vec()
                }
            })
            .collect(),
        Init::File(index) => data.get(index).map(|bytes| bytes.to_vec()).unwrap_or_default(),
    };
    if memory.view.is_none() {
        return Some(dense);
    }
    let mut bytes = vec![GAP; memory.elements * size];
    for (place, element) in view.places().zip(dense.chunks_exact(size)) {
        bytes[place * size..][..size].copy_from_slice(element);
    }
    Some(bytes)
}

impl LaunchSpec {
    /// Reads the `.npy` files that the launch file names. Relative paths refer to `folder`.
    ///
    /// # Errors
    /// When a file cannot be read, or its number of elements differs from that of its buffer.
    pub fn read_files(&mut self, folder: &Path) -> Result<(), LaunchError> {
        let mut data: Vec<Arc<[u8]>> = Vec::new();
        for file in &self.files {
            let refuse = |reason: String| LaunchError::File { key: file.key.clone(), reason };
            let numbers =
                Numbers::load(&folder.join(&file.path)).map_err(|error| refuse(error.to_string()))?;
            data.push(numbers.converted(file.dtype).into());
        }
        let sized = |memory: &Memory| match memory.init {
            Init::File(index) => Some((index, memory.shaped().len() * memory.dtype.bytes())),
            _ => None,
        };
        let memories = (0..self.args.len()).filter_map(|at| match &self.args[at] {
            ArgSpec::TensorMap(map) => map.own_memory(),
            _ => self.shape_of(at),
        });
        let references = self.references.iter().filter_map(|reference| match &reference.source {
            ReferenceSource::File { file, .. } => {
                let memory = self.shape_of(reference.output)?;
                Some((*file, memory.shaped().len() * memory.dtype.bytes()))
            }
            _ => None,
        });
        for (index, bytes) in memories.filter_map(|memory| sized(&memory)).chain(references) {
            let (file, found) = (&self.files[index], data[index].len());
            if found != bytes {
                let size = file.dtype.bytes();
                let (found, wanted) = (found / size, bytes / size);
                let reason = format!("{} has {found} elements; expected {wanted}", file.path);
                return Err(LaunchError::File { key: file.key.clone(), reason });
            }
        }
        self.data = data;
        Ok(())
    }

    /// Type, shape and contents of an argument's memory; `None` for arguments without memory, or with
    /// negative strides.
    pub(crate) fn shape_of(&self, at: usize) -> Option<Memory> {
        match self.args.get(at)? {
            ArgSpec::Buffer(memory) => Some(*memory),
            ArgSpec::Tensor(tensor) => {
                let problem = self.problem.as_ref()?;
                let strides = problem.strides(*tensor);
                let strides = [strides.batch, strides.head, strides.row];
                let mut forward = [1; 4];
                for (to, from) in forward.iter_mut().zip(strides) {
                    *to = usize::try_from(from).ok()?;
                }
                let view = View::strided(&problem.extents(*tensor), &forward);
                let init = if *tensor == Tensor::Out { self.out_init } else { Init::Random };
                let elements = problem.span(*tensor)?.0;
                Some(Memory { dtype: type_of(problem.dtypes.of(*tensor)), elements, init, view: Some(view) })
            }
            ArgSpec::Lse => {
                let problem = self.problem.as_ref()?;
                let (b, h, s) = (problem.batch, problem.heads_q, problem.seq_q);
                let strides = match self.lse_layout {
                    Layout::Bhsd => [h * s, s, 1],
                    Layout::Bshd => [h * s, 1, h],
                };
                let view = View::strided(&[b, h, s], &strides);
                Some(Memory {
                    dtype: BufferType::F32,
                    elements: b * h * s,
                    init: self.lse_init,
                    view: Some(view),
                })
            }
            _ => None,
        }
    }
}

pub(super) const fn type_of(dtype: DType) -> BufferType {
    match dtype {
        DType::F16 => BufferType::F16,
        DType::Bf16 => BufferType::Bf16,
        DType::F32 => BufferType::F32,
        DType::E4m3 => BufferType::E4m3,
        DType::E5m2 => BufferType::E5m2,
    }
}
