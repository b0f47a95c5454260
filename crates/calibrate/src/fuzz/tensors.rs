//! Mutated tensor files, read as `flashcore run` reads them.

use std::collections::BTreeMap;
use std::path::Path;

use cpu::CpuPlan;
use judge::values::{Inputs, Values};
use problem::{DType, Layout, Problem};
use rand::Rng;
use rand::rngs::SmallRng;

use super::mutate::damage;
use check::files::{FileError, Tensor, encode, parse};
use host::panics::{Panic, contain};

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TensorFile {
    /// The name, whose extension gives the format.
    pub name: &'static str,
    pub bytes: Vec<u8>,
}

/// Valid files: each format with each type that it supports.
///
/// # Errors
/// When a file cannot be encoded.
pub fn files() -> Result<Vec<TensorFile>, FileError> {
    let mut files = Vec::new();
    for (name, dtype) in [
        ("q.npy", DType::F16),
        ("q.npy", DType::F32),
        ("q.safetensors", DType::F16),
        ("q.safetensors", DType::Bf16),
        ("q.safetensors", DType::F32),
    ] {
        let values: Vec<f32> = (0..48).map(|i| i as f32 / 7.0 - 3.0).collect();
        let tensor = Tensor { values: Values::round(dtype, &values), shape: vec![1, 2, 3, 8] };
        let bytes = encode(Path::new(name), &BTreeMap::from([("q".to_owned(), tensor)]))?;
        files.push(TensorFile { name, bytes });
    }
    Ok(files)
}

/// A file with a few edits, most of them in its header.
pub fn damaged(rng: &mut SmallRng, file: &TensorFile) -> TensorFile {
    let header = rng.random_range(1..=file.bytes.len());
    let (mut head, tail) = (file.bytes[..header].to_vec(), &file.bytes[header..]);
    for _ in 0..rng.random_range(1..5) {
        damage(rng, &mut head);
    }
    head.extend_from_slice(tail);
    TensorFile { name: file.name, bytes: head }
}

/// Reads the file and computes self-attention on its tensor. Returns `true` when the file is valid input for
/// this computation.
///
/// # Errors
/// The panic in which the run ended.
pub fn run(file: &TensorFile) -> Result<bool, Panic> {
    contain(|| {
        let Ok(Tensor { values, shape }) = parse(Path::new(file.name), &file.bytes, "q") else {
            return false;
        };
        let [batch, heads, rows, dim] = shape[..] else { return false };
        let Some(dtype) = values.dtype().float() else { return false };
        let problem = Problem::new(batch, heads, rows, dim, dtype).with_layout(Layout::Bhsd);
        let inputs = Inputs::of(values.clone(), values.clone(), values);
        inputs.attention(&problem, &CpuPlan::for_problem(&problem)).is_ok()
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use rand::SeedableRng;

    #[test]
    fn damaged_tensor_files_get_answers() {
        let mut rng = SmallRng::seed_from_u64(3);
        let files = files().unwrap();
        assert!(files.iter().all(|file| run(file) == Ok(true)));
        let mut usable = 0;
        for i in 0..2000 {
            let file = damaged(&mut rng, &files[i % files.len()]);
            usable += u32::from(run(&file).unwrap_or_else(|panic| panic!("{panic}: {:?}", file.bytes)));
        }
        assert!((10..1900).contains(&usable), "{usable}");
    }
}
