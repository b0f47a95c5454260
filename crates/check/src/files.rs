//! Tensors in `.npy` and `.safetensors` files.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use half::f16;
use npyz::WriterBuilder;
use problem::{DType, ElementType};
use ptx::quote;
use safetensors::SafeTensors;
use safetensors::tensor::{Dtype, TensorView};

use host::store::{self, StoreError};
use judge::values::Values;

/// A dense tensor in C order.
#[derive(Clone, Debug, PartialEq)]
pub struct Tensor {
    pub values: Values,
    pub shape: Vec<usize>,
}

impl Tensor {
    /// Type of the elements, which [`load`] and [`parse`] have found to be floats.
    pub fn dtype(&self) -> DType {
        self.values.dtype().float().expect("tensors in files are floats")
    }
}

/// Why a tensor file cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum FileError {
    #[error(transparent)]
    Store(#[from] StoreError),
    /// The extension is neither `.npy` nor `.safetensors`.
    #[error("invalid file {0}: expected a .npy or .safetensors file")]
    Extension(PathBuf),
    #[error("{path}: {reason}")]
    Malformed { path: PathBuf, reason: String },
    /// An element type that attention does not support.
    #[error("{path}: tensor {name} has elements of type {dtype}: expected {accepted}")]
    DType {
        path: PathBuf,
        name: String,
        dtype: String,
        /// Accepted element types.
        accepted: &'static str,
    },
    /// The file has no tensor with the requested name.
    #[error("{path} has no tensor \"{name}\"; it has: {present}")]
    Absent {
        path: PathBuf,
        name: String,
        /// Names of the tensors in the file.
        present: String,
    },
}

/// Reads regular files only: a device or a pipe may have no end.
pub(crate) fn read(path: &Path) -> Result<Vec<u8>, FileError> {
    let read = match std::fs::metadata(path) {
        Ok(found) if !found.is_file() => Err(std::io::Error::other("it is not a regular file")),
        _ => std::fs::read(path),
    };
    Ok(read.map_err(|source| StoreError::Read { path: path.to_path_buf(), source })?)
}

pub(crate) fn malformed(path: &Path, reason: impl ToString) -> FileError {
    FileError::Malformed { path: path.to_path_buf(), reason: reason.to_string() }
}

fn extension(path: &Path) -> &str {
    path.extension().and_then(|e| e.to_str()).unwrap_or("")
}

/// Reads the tensor `name`. A `.npy` file holds a single tensor, and `name` is ignored.
///
/// # Errors
/// When the file cannot be read or does not hold such a tensor.
pub fn load(path: &Path, name: &str) -> Result<Tensor, FileError> {
    // The extension is checked first, so that no other file is read.
    match extension(path) {
        "npy" | "safetensors" => parse(path, &read(path)?, name),
        _ => Err(FileError::Extension(path.to_path_buf())),
    }
}

/// Parses the tensor `name` from `bytes`, the contents of a file.
///
/// # Errors
/// When `bytes` do not hold such a tensor.
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
            format!(
                "shape ({}) does not fit the {held} elements there",
                quote::list(tensor.shape.iter().map(usize::to_string))
            ),
        ));
    }
    Ok(tensor)
}

/// Element types that are read from a `.npy` file.
const NPY_TYPES: &str =
    "<f2 (f16), <f4 (f32); NumPy has no bf16 and no 8-bit floats, use .safetensors for them";

fn parse_npy(path: &Path, bytes: &[u8], name: &str) -> Result<Tensor, FileError> {
    let (header, data) = npy_header(bytes).map_err(|reason| malformed(path, reason))?;
    let refuse = |dtype: &str| FileError::DType {
        path: path.to_path_buf(),
        name: name.to_owned(),
        dtype: quote::cut(dtype).into_owned(),
        accepted: NPY_TYPES,
    };
    let width = match value(header, "descr") {
        Some("<f2") => 2,
        Some("<f4") => 4,
        Some("|O" | "O") => return Err(refuse("|O (Python objects)")),
        Some(other) => return Err(refuse(other)),
        None => return Err(malformed(path, "the header has no element type (descr)")),
    };
    let shape = extents(header).map_err(|reason| malformed(path, reason))?;
    if shape.iter().product::<usize>() * width > data.len() {
        let shape = quote::list(shape.iter().map(usize::to_string));
        return Err(malformed(path, format!("the file ends before its array of shape ({shape}) does")));
    }
    let file = npyz::NpyFile::new(bytes).map_err(|e| malformed(path, e))?;
    if file.order() != npyz::Order::C && shape.len() > 1 {
        return Err(malformed(path, "the array is in Fortran order; save it with numpy.ascontiguousarray"));
    }
    let dtype = file.dtype().descr();
    let values = match dtype.trim_matches('\'') {
        "<f2" => file.into_vec::<f16>().map(Values::F16),
        "<f4" => file.into_vec::<f32>().map(Values::F32),
        other => return Err(refuse(other)),
    };
    Ok(Tensor { values: values.map_err(|e| malformed(path, e))?, shape })
}

/// The header of a `.npy` file (the text of a Python dictionary) and the data after it. The header's length
/// is checked against the file's length before memory is allocated.
pub(crate) fn npy_header(bytes: &[u8]) -> Result<(&str, &[u8]), String> {
    let rest = bytes.strip_prefix(b"\x93NUMPY").ok_or("the file does not begin with \\x93NUMPY")?;
    let (&[version, _], rest) = rest.split_first_chunk().ok_or("the file ends within its first bytes")?;
    let (length, rest) = match version {
        1 => rest.split_first_chunk().map(|(&length, rest)| (u32::from(u16::from_le_bytes(length)), rest)),
        2 | 3 => rest.split_first_chunk().map(|(&length, rest)| (u32::from_le_bytes(length), rest)),
        _ => {
            return Err(format!("invalid value '{version}' for the version of the format: expected 1, 2, 3"));
        }
    }
    .ok_or("the file ends within its first bytes")?;
    let (header, data) = rest.split_at_checked(length as usize).ok_or_else(|| {
        let rest = rest.len();
        format!("the file says that its header has {length} bytes, but only {rest} bytes follow")
    })?;
    let header = std::str::from_utf8(header).map_err(|_| "the header is not text")?;
    Ok((header, data))
}

/// The text of a key's value without its quotes. For a structured type, the beginning of the value.
pub(crate) fn value<'h>(header: &'h str, key: &str) -> Option<&'h str> {
    let after = ['\'', '"'].into_iter().find_map(|q| Some(header.split_once(&format!("{q}{key}{q}"))?.1))?;
    let value = after.trim_start().strip_prefix(':')?.trim_start();
    match value.chars().next()? {
        quote @ ('\'' | '"') => value[1..].split_once(quote).map(|(text, _)| text),
        _ => Some(value.split([',', '}']).next().unwrap_or(value).trim()),
    }
}

/// The extents in a header (`… 'shape': (1, 8, 512, 64), …`). Their product is checked to fit an element
/// count, because npyz multiplies without a check.
pub(crate) fn extents(header: &str) -> Result<Vec<usize>, String> {
    let shape = header.split_once("shape").and_then(|(_, rest)| rest.split_once('(')?.1.split_once(')'));
    let (list, _) = shape.ok_or("the header has no shape")?;
    let words = list.split(',').map(str::trim).filter(|word| !word.is_empty());
    let extent = |word: &str| match word.parse::<usize>() {
        Ok(extent) => Ok(extent),
        Err(_) if word.strip_prefix('-').is_some_and(|n| n.bytes().all(|b| b.is_ascii_digit())) => {
            Err(format!("the shape has a negative extent, {}", quote::cut(word)))
        }
        Err(_) if word.bytes().all(|b| b.is_ascii_digit()) => {
            Err(format!("the shape has an extent of 2^64 or more, {}", quote::cut(word)))
        }
        Err(_) => Err(format!("the shape has an extent that is no number, {}", quote::cut(word))),
    };
    let extents = words.map(extent).collect::<Result<Vec<_>, _>>()?;
    let elements = extents.iter().try_fold(1usize, |n, &extent| n.checked_mul(extent));
    // The widest element has eight bytes.
    match elements.filter(|&n| n < 1 << 60) {
        Some(_) => Ok(extents),
        None => Err("the extents of the shape multiply to 2^60 or more".to_owned()),
    }
}

fn parse_safetensors(path: &Path, bytes: &[u8], name: &str) -> Result<Tensor, FileError> {
    let file = SafeTensors::deserialize(bytes).map_err(|e| malformed(path, e))?;
    let tensor = file.tensor(name).map_err(|_| FileError::Absent {
        path: path.to_path_buf(),
        name: name.to_owned(),
        present: {
            let mut names = file.names();
            names.sort_unstable();
            quote::list(names)
        },
    })?;
    let dtype = match tensor.dtype() {
        Dtype::F16 => DType::F16,
        Dtype::BF16 => DType::Bf16,
        Dtype::F32 => DType::F32,
        Dtype::F8_E4M3 => DType::E4m3,
        Dtype::F8_E5M2 => DType::E5m2,
        other => {
            let (name, dtype) = (name.to_owned(), format!("{other:?}"));
            return Err(FileError::DType {
                path: path.to_path_buf(),
                name,
                dtype,
                accepted: "F16, BF16, F32, F8_E4M3, F8_E5M2",
            });
        }
    };
    Ok(Tensor { values: Values::from_bytes(dtype, tensor.data()), shape: tensor.shape().to_vec() })
}

/// Writes all tensors to a `.safetensors` file, or one tensor to a `.npy` file. The file is written
/// completely or not at all.
///
/// # Errors
/// When the file cannot be written, or a `.npy` file is given several tensors or a type that NumPy lacks.
pub fn save(path: &Path, tensors: &BTreeMap<String, Tensor>) -> Result<(), FileError> {
    Ok(store::write(path, &encode(path, tensors)?)?)
}

/// The contents of the file that [`save`] writes; the extension of `path` states the format.
///
/// # Errors
/// When the format cannot hold the tensors.
pub fn encode(path: &Path, tensors: &BTreeMap<String, Tensor>) -> Result<Vec<u8>, FileError> {
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
            ElementType::F16 => Dtype::F16,
            ElementType::Bf16 => Dtype::BF16,
            ElementType::F32 => Dtype::F32,
            ElementType::I32 => Dtype::I32,
            ElementType::U8 => Dtype::U8,
            ElementType::E4m3 => Dtype::F8_E4M3,
            ElementType::E5m2 => Dtype::F8_E5M2,
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
        Values::I32(data) => write(&shape, data).map_err(|e| malformed(path, e)),
        Values::U8(data) => write(&shape, data).map_err(|e| malformed(path, e)),
        Values::Bf16(_) => Err(malformed(path, "NumPy has no bf16; use .safetensors for it")),
        Values::E4m3(_) | Values::E5m2(_) => {
            Err(malformed(path, "NumPy has no 8-bit floats; use .safetensors for them"))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use host::store::Scratch;

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
                    let named =
                        error.to_string().contains(if dtype.is_fp8() { "no 8-bit" } else { "no bf16" });
                    assert!((dtype == DType::Bf16 || dtype.is_fp8()) && named, "{error}")
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
        let header = |descr: &str, shape: &str| {
            let text = format!("{{'descr': {descr}, 'fortran_order': False, 'shape': ({shape}), }}\n");
            [b"\x93NUMPY\x01\x00", &(text.len() as u16).to_le_bytes()[..], text.as_bytes()].concat()
        };
        let refused = |bytes: &[u8]| parse(Path::new("x.npy"), bytes, "q").unwrap_err().to_string();
        for (shape, said) in [
            ("4294967296, 4294967296, 1, 1", "multiply to 2^60 or more"),
            ("1, 2, 3, 99999999999999999999", "an extent of 2^64 or more"),
            ("1, 2, -3, 8", "a negative extent, -3"),
            ("1, 2, x, 8", "no number, x"),
            ("1, 2, 3, 8", "ends before its array of shape (1, 2, 3, 8) does"),
        ] {
            let error = refused(&header("'<f4'", shape));
            assert!(error.contains(said), "{shape}: {error}");
        }
        for (descr, said) in [
            ("'|O'", "elements of type |O (Python objects): expected <f2 (f16), <f4 (f32)"),
            ("'>f4'", "elements of type >f4"),
            ("[('a', '<f4'), ('b', '<i4')]", "elements of type [('a'"),
            ("''", "elements of type : expected"),
        ] {
            let error = refused(&header(descr, "1, 2, 3, 8"));
            assert!(error.contains(said), "{descr}: {error}");
        }
        assert!(load(&scratch.path(""), "q").is_err());
        assert!(load(&scratch.path("absent.npy"), "q").unwrap_err().to_string().contains("cannot read"));
    }

    /// A file of a few bytes may claim a header of 4 GB. The reader must not allocate that.
    #[test]
    fn a_header_is_no_longer_than_its_file() {
        for version in [2, 3] {
            let claim =
                [b"\x93NUMPY", &[version, 0][..], &u32::MAX.to_le_bytes(), b"{'descr': '<f4'"].concat();
            let error = parse(Path::new("x.npy"), &claim, "q").unwrap_err().to_string();
            assert!(error.contains("its header has 4294967295 bytes, but only 15 bytes follow"), "{error}");
        }
        for bytes in
            [&b"\x93NUMPY"[..], b"\x93NUMPY\x01", b"\x93NUMPY\x01\x00\x10", b"\x93NUMPY\x09\x00\x10\x00"]
        {
            assert!(matches!(parse(Path::new("x.npy"), bytes, "q"), Err(FileError::Malformed { .. })));
        }
        for length in [u64::MAX, 1 << 40, 100] {
            let claim = [&length.to_le_bytes()[..], b"{}"].concat();
            let error = parse(Path::new("x.safetensors"), &claim, "q").unwrap_err();
            assert!(matches!(error, FileError::Malformed { .. }), "{error}");
        }
    }

    #[test]
    fn the_tensors_of_a_file_are_listed_shortly() {
        let tensor = Tensor { values: Values::round(DType::F32, &[1.0]), shape: vec![1] };
        let tensors = (0..300).map(|i| (format!("layer.{i:03}"), tensor.clone())).collect();
        let bytes = encode(Path::new("x.safetensors"), &tensors).unwrap();
        let error = parse(Path::new("x.safetensors"), &bytes, "q").unwrap_err().to_string();
        assert!(error.ends_with("layer.009 and 290 more"), "{error}");
    }
}
