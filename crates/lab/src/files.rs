//! Tensors in `.npy` and `.safetensors` files.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use half::f16;
use npyz::WriterBuilder;
use problem::DType;
use safetensors::SafeTensors;
use safetensors::tensor::{Dtype, TensorView};

use crate::store::{self, StoreError};
use crate::values::Values;

/// A dense tensor in C order.
#[derive(Clone, Debug, PartialEq)]
pub struct Tensor {
    /// Its elements.
    pub values: Values,
    /// Its extents.
    pub shape: Vec<usize>,
}

/// Why a tensor file cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum FileError {
    /// Not readable or writable.
    #[error(transparent)]
    Store(#[from] StoreError),
    /// Another kind of file.
    #[error("{0}: tensors are read from .npy and .safetensors files")]
    Extension(PathBuf),
    /// Damaged.
    #[error("{path}: {reason}")]
    Malformed {
        /// The file.
        path: PathBuf,
        /// What is wrong with it.
        reason: String,
    },
    /// An element type that attention does not take.
    #[error("{path}: tensor {name} has elements of type {dtype}; accepted: {accepted}")]
    DType {
        /// The file.
        path: PathBuf,
        /// The tensor.
        name: String,
        /// Its element type.
        dtype: String,
        /// What would be accepted.
        accepted: &'static str,
    },
    /// A tensor that is not in the file.
    #[error("{path} has no tensor \"{name}\"; it has: {present}")]
    Absent {
        /// The file.
        path: PathBuf,
        /// The tensor.
        name: String,
        /// The tensors there are.
        present: String,
    },
}

fn read(path: &Path) -> Result<Vec<u8>, FileError> {
    Ok(std::fs::read(path).map_err(|source| StoreError::Read { path: path.to_path_buf(), source })?)
}

fn malformed(path: &Path, reason: impl ToString) -> FileError {
    FileError::Malformed { path: path.to_path_buf(), reason: reason.to_string() }
}

fn extension(path: &Path) -> &str {
    path.extension().and_then(|e| e.to_str()).unwrap_or("")
}

/// Reads the tensor `name`; a `.npy` file holds one, whatever its name.
///
/// # Errors
/// When the file cannot be read or does not hold such a tensor.
pub fn load(path: &Path, name: &str) -> Result<Tensor, FileError> {
    // Not read before it is known to be of a kind that can be used.
    match extension(path) {
        "npy" | "safetensors" => parse(path, &read(path)?, name),
        _ => Err(FileError::Extension(path.to_path_buf())),
    }
}

/// The tensor `name` of a file whose contents are `bytes`.
///
/// # Errors
/// When they do not hold such a tensor.
pub fn parse(path: &Path, bytes: &[u8], name: &str) -> Result<Tensor, FileError> {
    let tensor = match extension(path) {
        "npy" => parse_npy(path, bytes, name)?,
        "safetensors" => parse_safetensors(path, bytes, name)?,
        _ => return Err(FileError::Extension(path.to_path_buf())),
    };
    let elements = tensor.shape.iter().try_fold(1usize, |n, &extent| n.checked_mul(extent));
    if elements != Some(tensor.values.len()) {
        let held = tensor.values.len();
        return Err(malformed(
            path,
            format!("shape {:?} does not fit the {held} elements there", tensor.shape),
        ));
    }
    Ok(tensor)
}

fn parse_npy(path: &Path, bytes: &[u8], name: &str) -> Result<Tensor, FileError> {
    if !countable(bytes) {
        return Err(malformed(path, "the extents of its shape multiply to more than 2^63"));
    }
    let file = npyz::NpyFile::new(bytes).map_err(|e| malformed(path, e))?;
    if file.order() != npyz::Order::C && file.shape().len() > 1 {
        return Err(malformed(path, "the array is in Fortran order; save it with numpy.ascontiguousarray"));
    }
    let shape = file.shape().iter().map(|&n| n as usize).collect();
    let dtype = file.dtype().descr();
    let values = match dtype.trim_matches('\'') {
        "<f2" => file.into_vec::<f16>().map(Values::F16),
        "<f4" => file.into_vec::<f32>().map(Values::F32),
        other => {
            let accepted = "<f2 (f16), <f4 (f32); NumPy has no bf16, use .safetensors for it";
            let (name, dtype) = (name.to_owned(), other.to_owned());
            return Err(FileError::DType { path: path.to_path_buf(), name, dtype, accepted });
        }
    };
    let values = values.map_err(|e| match e.kind() {
        std::io::ErrorKind::UnexpectedEof => {
            malformed(path, format!("it ends before its array of shape {shape:?} does"))
        }
        _ => malformed(path, e),
    })?;
    Ok(Tensor { values, shape })
}

/// Whether the number of elements that a `.npy` header (`… 'shape': (1, 8, 512, 64), …`) tells of is one: npyz
/// multiplies without looking.
fn countable(bytes: &[u8]) -> bool {
    let header = String::from_utf8_lossy(&bytes[..bytes.len().min(1 << 16)]);
    let shape = header.split_once("shape").and_then(|(_, rest)| rest.split_once('(')?.1.split_once(')'));
    let extents = shape.iter().flat_map(|(list, _)| list.split(',')).map(str::trim).filter(|n| !n.is_empty());
    let mut elements = Some(1u64);
    for extent in extents {
        elements =
            elements.zip(extent.parse().ok()).and_then(|(n, extent): (u64, u64)| n.checked_mul(extent));
    }
    // Eight bytes is the widest element.
    elements.is_some_and(|n| n < 1 << 60)
}

fn parse_safetensors(path: &Path, bytes: &[u8], name: &str) -> Result<Tensor, FileError> {
    let file = SafeTensors::deserialize(bytes).map_err(|e| malformed(path, e))?;
    let tensor = file.tensor(name).map_err(|_| FileError::Absent {
        path: path.to_path_buf(),
        name: name.to_owned(),
        present: file.names().into_iter().map(|n| n.to_string()).collect::<Vec<_>>().join(", "),
    })?;
    let dtype = match tensor.dtype() {
        Dtype::F16 => DType::F16,
        Dtype::BF16 => DType::Bf16,
        Dtype::F32 => DType::F32,
        other => {
            let (name, dtype) = (name.to_owned(), format!("{other:?}"));
            return Err(FileError::DType {
                path: path.to_path_buf(),
                name,
                dtype,
                accepted: "F16, BF16, F32",
            });
        }
    };
    Ok(Tensor { values: Values::from_bytes(dtype, tensor.data()), shape: tensor.shape().to_vec() })
}

/// Writes tensors: all of them to a `.safetensors` file, or one to a `.npy` file. The file appears whole or not at all.
///
/// # Errors
/// When it cannot be written, or a `.npy` file is asked to hold what it cannot.
pub fn save(path: &Path, tensors: &BTreeMap<String, Tensor>) -> Result<(), FileError> {
    Ok(store::write(path, &encode(path, tensors)?)?)
}

/// The contents of the file that [`save`] writes.
pub(crate) fn encode(path: &Path, tensors: &BTreeMap<String, Tensor>) -> Result<Vec<u8>, FileError> {
    match (extension(path), tensors.first_key_value()) {
        ("safetensors", _) => safetensors_bytes(path, tensors),
        ("npy", Some((_, tensor))) if tensors.len() == 1 => npy_bytes(path, tensor),
        ("npy", _) => Err(malformed(path, "a .npy file holds one tensor; use .safetensors for several")),
        _ => Err(FileError::Extension(path.to_path_buf())),
    }
}

fn safetensors_bytes(path: &Path, tensors: &BTreeMap<String, Tensor>) -> Result<Vec<u8>, FileError> {
    let data: Vec<(&String, &Tensor, Vec<u8>)> =
        tensors.iter().map(|(name, t)| (name, t, t.values.to_bytes())).collect();
    let views = data.iter().map(|(name, tensor, bytes)| {
        let dtype = match tensor.values.dtype() {
            DType::F16 => Dtype::F16,
            DType::Bf16 => Dtype::BF16,
            DType::F32 => Dtype::F32,
        };
        TensorView::new(dtype, tensor.shape.clone(), bytes).map(|view| (name.as_str(), view))
    });
    let views = views.collect::<Result<Vec<_>, _>>().map_err(|e| malformed(path, e))?;
    safetensors::serialize(views, None).map_err(|e| malformed(path, e))
}

fn npy_bytes(path: &Path, tensor: &Tensor) -> Result<Vec<u8>, FileError> {
    fn write<T: npyz::AutoSerialize + Copy>(shape: &[u64], data: &[T]) -> std::io::Result<Vec<u8>> {
        let mut bytes = Vec::new();
        let mut writer =
            npyz::WriteOptions::new().default_dtype().shape(shape).writer(&mut bytes).begin_nd()?;
        writer.extend(data.iter().copied())?;
        writer.finish()?;
        Ok(bytes)
    }
    let shape: Vec<u64> = tensor.shape.iter().map(|&n| n as u64).collect();
    match &tensor.values {
        Values::F16(data) => write(&shape, data).map_err(|e| malformed(path, e)),
        Values::F32(data) => write(&shape, data).map_err(|e| malformed(path, e)),
        Values::Bf16(_) => Err(malformed(path, "NumPy has no bf16; use .safetensors for it")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::store::Scratch;

    #[test]
    fn what_is_saved_is_loaded() {
        let scratch = Scratch::new().unwrap();
        for dtype in DType::ALL {
            let values = Values::round(dtype, &[1.0, -2.5, 0.0, 4.0, f32::INFINITY, 6.0]);
            let tensor = Tensor { values, shape: vec![1, 2, 3, 1] };
            let tensors = BTreeMap::from([("out".to_owned(), tensor.clone())]);
            let path = scratch.path("x.safetensors");
            save(&path, &tensors).unwrap();
            assert_eq!(load(&path, "out").unwrap(), tensor);
            let error = load(&path, "q").unwrap_err().to_string();
            assert!(error.contains("has no tensor \"q\"; it has: out"), "{error}");
            let path = scratch.path("x.npy");
            match save(&path, &tensors) {
                Ok(()) => assert_eq!(load(&path, "out").unwrap(), tensor),
                Err(error) => {
                    assert!(dtype == DType::Bf16 && error.to_string().contains("no bf16"), "{error}")
                }
            }
        }
    }

    #[test]
    fn damaged_files_are_refused() {
        let scratch = Scratch::new().unwrap();
        for name in ["x.npy", "x.safetensors", "x.txt"] {
            std::fs::write(scratch.path(name), b"\x93NUMPY, or not").unwrap();
            assert!(load(&scratch.path(name), "q").is_err(), "{name}");
        }
        let header = |shape: &str| {
            let text = format!("{{'descr': '<f4', 'fortran_order': False, 'shape': ({shape}), }}\n");
            [b"\x93NUMPY\x01\x00", &(text.len() as u16).to_le_bytes()[..], text.as_bytes()].concat()
        };
        for (shape, said) in [
            ("4294967296, 4294967296, 1, 1", "multiply to more than"),
            ("1, 2, 3, 99999999999999999999", "multiply to more than"),
            ("1, 2, 3, 8", "ends before its array"),
        ] {
            let error = parse(Path::new("x.npy"), &header(shape), "q").unwrap_err().to_string();
            assert!(error.contains(said), "{shape}: {error}");
        }
        assert!(load(&scratch.path("absent.npy"), "q").unwrap_err().to_string().contains("cannot read"));
    }
}
