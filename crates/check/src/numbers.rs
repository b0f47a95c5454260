//! Arrays of any element type in `.npy` and `.safetensors` files, for buffers and references.

use std::path::{Path, PathBuf};

use ptx::quote;

use safetensors::SafeTensors;
use safetensors::tensor::Dtype;
use serde::Serialize;

use crate::files::{FileError, extents, malformed, npy_header, read, value};
use crate::launchfile::BufferType;

/// An element. Integers are exact.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
#[serde(untagged)]
pub enum Number {
    /// A number of a 64-bit or smaller integer type.
    Integer(i128),
    Real(f64),
}

impl Number {
    /// The number that an element of a type holds.
    ///
    /// # Panics
    /// When `bytes` are fewer than [`BufferType::bytes`].
    pub fn of(dtype: BufferType, bytes: &[u8]) -> Number {
        let word = || std::array::from_fn(|at| bytes[at]);
        match dtype {
            BufferType::U64 => Number::Integer(u64::from_le_bytes(word()).into()),
            BufferType::I64 => Number::Integer(i64::from_le_bytes(word()).into()),
            _ => Number::Real(dtype.decode(bytes)).in_type(dtype),
        }
    }

    /// The nearest f64.
    pub fn value(self) -> f64 {
        match self {
            Number::Integer(n) => n as f64,
            Number::Real(x) => x,
        }
    }

    /// A whole f64 as an integer, if the type is an integer type with that number.
    pub(crate) fn in_type(self, dtype: BufferType) -> Number {
        match (self, dtype.integers()) {
            (Number::Real(x), Some((low, high))) if x.fract() == 0.0 => {
                let n = x as i128;
                if (low..=high).contains(&n) { Number::Integer(n) } else { self }
            }
            _ => self,
        }
    }
}

impl std::fmt::Display for Number {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Number::Integer(n) => write!(f, "{n}"),
            Number::Real(x) => write!(f, "{x:e}"),
        }
    }
}

/// A dense array in C order.
#[derive(Clone, Debug, PartialEq)]
pub struct Numbers {
    pub dtype: BufferType,
    pub shape: Vec<usize>,
    /// The elements in little-endian order.
    pub bytes: Vec<u8>,
}

/// NumPy's names of the element types. `?` elements are bytes of 0 and 1.
const TYPES: [(&str, BufferType); 12] = [
    ("|u1", BufferType::U8),
    ("|i1", BufferType::I8),
    ("<u2", BufferType::U16),
    ("<i2", BufferType::I16),
    ("<u4", BufferType::U32),
    ("<i4", BufferType::I32),
    ("<u8", BufferType::U64),
    ("<i8", BufferType::I64),
    ("<f2", BufferType::F16),
    ("<f4", BufferType::F32),
    ("<f8", BufferType::F64),
    ("|b1", BufferType::U8),
];

const ACCEPTED: &str = "|u1, |i1, <u2, <i2, <u4, <i4, <u8, <i8, <f2, <f4, <f8, |b1";

impl Numbers {
    /// An array that NumPy can represent: types that it lacks become f32.
    pub fn of(dtype: BufferType, shape: &[usize], bytes: &[u8]) -> Numbers {
        let known = TYPES.iter().any(|(_, known)| *known == dtype);
        let bytes = match known {
            true => bytes.to_vec(),
            false => bytes
                .chunks_exact(dtype.bytes())
                .flat_map(|element| (dtype.decode(element) as f32).to_le_bytes())
                .collect(),
        };
        Numbers { dtype: if known { dtype } else { BufferType::F32 }, shape: shape.to_vec(), bytes }
    }

    /// Reads a `.npy` file, or a tensor of a `.safetensors` file: `x.safetensors:NAME`, or without a name its
    /// only tensor.
    ///
    /// # Errors
    /// When the file cannot be read, has another format, or holds something other than numbers in C order.
    pub fn load(path: &Path) -> Result<Numbers, FileError> {
        if let Some((file, name)) = tensor_of(path) {
            return Numbers::of_safetensors(&file, &read(&file)?, name.as_deref());
        }
        if path.extension().is_none_or(|extension| extension != "npy") {
            return Err(malformed(path, "arrays are read from .npy and .safetensors files"));
        }
        let bytes = read(path)?;
        let (header, data) = npy_header(&bytes).map_err(|reason| malformed(path, reason))?;
        let descr = value(header, "descr").unwrap_or("");
        let found = TYPES.iter().find(|(name, _)| *name == descr);
        let dtype = found.map(|(_, dtype)| *dtype).ok_or_else(|| FileError::DType {
            path: path.to_path_buf(),
            name: "(the array)".to_owned(),
            dtype: ptx::quote::cut(descr).into_owned(),
            accepted: ACCEPTED,
        })?;
        let shape = extents(header).map_err(|reason| malformed(path, reason))?;
        if value(header, "fortran_order") == Some("True") && shape.len() > 1 {
            return Err(malformed(
                path,
                "the array is in Fortran order; save it with numpy.ascontiguousarray",
            ));
        }
        let size = shape.iter().product::<usize>() * dtype.bytes();
        let data = data.get(..size).ok_or_else(|| {
            let shape = ptx::quote::list(shape.iter().map(usize::to_string));
            malformed(path, format!("the file ends before its array of shape ({shape}) does"))
        })?;
        Ok(Numbers { dtype, shape, bytes: data.to_vec() })
    }

    fn of_safetensors(path: &Path, bytes: &[u8], name: Option<&str>) -> Result<Numbers, FileError> {
        let file = SafeTensors::deserialize(bytes).map_err(|error| malformed(path, error))?;
        let mut names = file.names();
        names.sort_unstable();
        let name = match (name, &names[..]) {
            (Some(name), _) => name,
            (None, [only]) => only,
            (None, _) => {
                let reason =
                    format!("it has the tensors {}; name one: FILE.safetensors:NAME", quote::list(&names));
                return Err(malformed(path, reason));
            }
        };
        let absent = |_| {
            let present = quote::list(&names);
            FileError::Absent { path: path.to_path_buf(), name: name.to_owned(), present }
        };
        let tensor = file.tensor(name).map_err(absent)?;
        let dtype = match tensor.dtype() {
            Dtype::BOOL | Dtype::U8 => BufferType::U8,
            Dtype::I8 => BufferType::I8,
            Dtype::U16 => BufferType::U16,
            Dtype::I16 => BufferType::I16,
            Dtype::U32 => BufferType::U32,
            Dtype::I32 => BufferType::I32,
            Dtype::U64 => BufferType::U64,
            Dtype::I64 => BufferType::I64,
            Dtype::F8_E4M3 => BufferType::E4m3,
            Dtype::F8_E5M2 => BufferType::E5m2,
            Dtype::F16 => BufferType::F16,
            Dtype::BF16 => BufferType::Bf16,
            Dtype::F32 => BufferType::F32,
            Dtype::F64 => BufferType::F64,
            other => {
                return Err(FileError::DType {
                    path: path.to_path_buf(),
                    name: name.to_owned(),
                    dtype: format!("{other:?}"),
                    accepted: "BOOL, U8 to I64, F8_E4M3, F8_E5M2, F16, BF16, F32, F64",
                });
            }
        };
        // The crate has checked that the length of the data matches the shape.
        Ok(Numbers { dtype, shape: tensor.shape().to_vec(), bytes: tensor.data().to_vec() })
    }

    /// The contents of a `.npy` file.
    pub fn to_npy(&self) -> Vec<u8> {
        let name = TYPES.iter().find(|(_, dtype)| *dtype == self.dtype).map_or("<f4", |(name, _)| name);
        let shape: String = self.shape.iter().map(|n| format!("{n}, ")).collect();
        let mut header = format!("{{'descr': '{name}', 'fortran_order': False, 'shape': ({shape}), }}");
        // The header ends with a line feed at a multiple of 64 bytes.
        let padding = (10 + header.len() + 1).next_multiple_of(64) - (10 + header.len() + 1);
        header += &" ".repeat(padding);
        header.push('\n');
        let length = u16::try_from(header.len()).unwrap_or(u16::MAX).to_le_bytes();
        [&b"\x93NUMPY\x01\x00"[..], &length, header.as_bytes(), &self.bytes].concat()
    }

    /// The elements, of which integers are exact.
    pub fn elements(&self) -> Vec<Number> {
        let elements = self.bytes.chunks_exact(self.dtype.bytes());
        elements.map(|element| Number::of(self.dtype, element)).collect()
    }

    /// The elements as f64. 64-bit integers are rounded.
    pub fn values(&self) -> Vec<f64> {
        self.bytes.chunks_exact(self.dtype.bytes()).map(|element| self.dtype.decode(element)).collect()
    }

    /// The elements in another type, rounded or wrapped.
    pub fn converted(&self, dtype: BufferType) -> Vec<u8> {
        if dtype == self.dtype {
            return self.bytes.clone();
        }
        self.values().into_iter().flat_map(|value| dtype.encode(value)).collect()
    }
}

/// The `.safetensors` file that a path names, and the tensor after a colon.
fn tensor_of(path: &Path) -> Option<(PathBuf, Option<String>)> {
    const EXTENSION: &str = ".safetensors";
    let text = path.to_str()?;
    if text.ends_with(EXTENSION) {
        return Some((path.to_path_buf(), None));
    }
    let (file, name) = text.split_once(".safetensors:")?;
    Some((PathBuf::from(format!("{file}{EXTENSION}")), Some(name.to_owned())))
}

#[cfg(test)]
mod tests {
    use super::*;
    use host::store::Scratch;

    #[test]
    fn what_is_written_is_read() {
        let scratch = Scratch::new().unwrap();
        for (_, dtype) in TYPES {
            let bytes: Vec<u8> =
                [1.0, 2.0, 3.0, 4.0, 0.0, 6.0].iter().flat_map(|&x| dtype.encode(x)).collect();
            let numbers = Numbers::of(dtype, &[2, 3], &bytes);
            let path = scratch.path("x.npy");
            std::fs::write(&path, numbers.to_npy()).unwrap();
            let again = Numbers::load(&path).unwrap();
            assert_eq!(again, numbers);
            assert_eq!(
                again.converted(BufferType::F64),
                Numbers::of(BufferType::F64, &[2, 3], &again.converted(BufferType::F64)).bytes
            );
            assert_eq!(again.values(), [1.0, 2.0, 3.0, 4.0, 0.0, 6.0]);
            assert!(again.elements().iter().all(|x| matches!(x, Number::Real(_)) == dtype.is_float()));
        }
        for (dtype, n) in [(BufferType::U64, u64::MAX.into()), (BufferType::I64, i64::MIN.into())] {
            let numbers = Numbers::of(dtype, &[1], &i128::to_le_bytes(n)[..8]);
            assert_eq!(numbers.elements(), [Number::Integer(n)]);
        }
        let e4m3 = Numbers::of(BufferType::E4m3, &[1], &BufferType::E4m3.encode(1.5));
        assert_eq!((e4m3.dtype, e4m3.values()), (BufferType::F32, vec![1.5]));
        std::fs::write(scratch.path("x.npy"), &Numbers::of(BufferType::F64, &[3], &[0; 24]).to_npy()[..100])
            .unwrap();
        let error = Numbers::load(&scratch.path("x.npy")).unwrap_err().to_string();
        assert!(error.contains("bytes follow") || error.contains("ends before"), "{error}");
        assert!(Numbers::load(&scratch.path("x.txt")).unwrap_err().to_string().contains(".npy and"));
    }

    #[test]
    fn tensors_of_safetensors_files_are_found_by_name() {
        let scratch = Scratch::new().unwrap();
        let write = |tensors: &[(&str, Dtype, Vec<usize>, &[u8])]| {
            let views = tensors.iter().map(|(name, dtype, shape, bytes)| {
                (*name, safetensors::tensor::TensorView::new(*dtype, shape.clone(), bytes).unwrap())
            });
            let path = scratch.path("x.safetensors");
            std::fs::write(&path, safetensors::serialize(views, None).unwrap()).unwrap();
            path
        };
        let named = |path: &Path, name: &str| PathBuf::from(format!("{}:{name}", path.display()));
        let path = write(&[("y", Dtype::BF16, vec![1, 2], &[0x80, 0x3f, 0x00, 0x40])]);
        let only = Numbers::load(&path).unwrap();
        assert_eq!((only.dtype, only.values()), (BufferType::Bf16, vec![1.0, 2.0]));
        assert_eq!(Numbers::load(&named(&path, "y")).unwrap(), only);
        let absent = Numbers::load(&named(&path, "z")).unwrap_err().to_string();
        assert!(absent.contains("has no tensor \"z\"; it has: y"), "{absent}");
        let path = write(&[
            ("a", Dtype::I64, vec![1], &7i64.to_le_bytes()),
            ("b", Dtype::F8_E4M3, vec![2], &[0x38, 0xc0]),
        ]);
        assert_eq!(Numbers::load(&named(&path, "a")).unwrap().values(), [7.0]);
        assert_eq!(Numbers::load(&named(&path, "b")).unwrap().values(), [1.0, -2.0]);
        let several = Numbers::load(&path).unwrap_err().to_string();
        assert!(several.contains("it has the tensors a, b; name one"), "{several}");
        let whole = std::fs::read(&path).unwrap();
        for length in [0, 7, 20, whole.len() - 1] {
            std::fs::write(&path, &whole[..length]).unwrap();
            assert!(Numbers::load(&named(&path, "a")).is_err(), "{length} bytes");
        }
    }
}
