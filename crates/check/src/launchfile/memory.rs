//! Buffers of a launch file: element types, shapes and initial contents.

use super::LaunchError;
use super::raw::RawArg;

/// Memory outside the problem's tensors.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Memory {
    pub dtype: BufferType,
    /// Elements from the first to the last one, including gaps.
    pub elements: usize,
    pub init: Init,
    /// Shape and strides, if the file states them.
    pub view: Option<View>,
}

impl Memory {
    /// Memory without a shape.
    pub const fn new(dtype: BufferType, elements: usize, init: Init) -> Memory {
        Memory { dtype, elements, init, view: None }
    }

    /// Size in bytes; `None` on overflow.
    pub(super) fn bytes(self) -> Option<usize> {
        self.elements.checked_mul(self.dtype.bytes())
    }

    /// The shape and the strides; without a stated shape, one dimension.
    pub fn shaped(self) -> View {
        self.view.unwrap_or_else(|| View::dense(&[self.elements]))
    }
}

/// Maximum number of dimensions of a buffer's shape, the same as for a tensor map.
pub const RANK: usize = 5;

/// Maximum number of elements of a buffer with a shape: as many bytes as a launch may have.
const ELEMENTS: usize = 1 << 32;

/// Shape and strides of a buffer in elements, outermost dimension first.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct View {
    rank: usize,
    shape: [usize; RANK],
    strides: [usize; RANK],
}

impl View {
    /// Rows without gaps. Only the last [`RANK`] extents count.
    pub fn dense(shape: &[usize]) -> View {
        let shape = &shape[shape.len().saturating_sub(RANK)..];
        let mut view = View { rank: shape.len(), shape: [1; RANK], strides: [0; RANK] };
        let mut stride = 1usize;
        for (at, &extent) in shape.iter().enumerate().rev() {
            (view.shape[at], view.strides[at]) = (extent, stride);
            stride = stride.saturating_mul(extent);
        }
        view
    }

    /// A shape with a stride for each dimension.
    pub fn strided(shape: &[usize], strides: &[usize]) -> View {
        let mut view = View::dense(shape);
        let rank = view.rank.min(strides.len());
        view.strides[..rank].copy_from_slice(&strides[..rank]);
        view
    }

    pub fn shape(&self) -> &[usize] {
        &self.shape[..self.rank]
    }

    pub fn strides(&self) -> &[usize] {
        &self.strides[..self.rank]
    }

    /// Number of elements, without gaps.
    pub fn len(&self) -> usize {
        self.shape().iter().product()
    }

    /// Whether there are no elements.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Elements from the first to the last one, including gaps; `None` on overflow, or for more elements than
    /// [`ELEMENTS`]. A stride of 0 reads one element many times.
    fn span(&self) -> Option<usize> {
        let ends = self.shape().iter().zip(self.strides());
        let last = ends
            .map(|(&n, &stride)| (n - 1).checked_mul(stride))
            .try_fold(0usize, |sum, end| sum.checked_add(end?))?;
        let elements = self.shape().iter().try_fold(1usize, |n, &extent| n.checked_mul(extent))?;
        if elements > ELEMENTS {
            return None;
        }
        last.checked_add(1)
    }

    /// The place of each element in memory, in the order of the shape.
    pub fn places(&self) -> impl Iterator<Item = usize> + '_ {
        (0..self.len()).map(|at| {
            let mut rest = at;
            (0..self.rank).rev().fold(0, |place, d| {
                let index = rest % self.shape[d];
                rest /= self.shape[d];
                place + index * self.strides[d]
            })
        })
    }
}

macro_rules! closed_names {
    ($(#[$doc:meta])* $type:ident: $($variant:ident = $name:literal),* $(,)?) => {
        $(#[$doc])*
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
        #[allow(missing_docs, reason = "the names say it")]
        pub enum $type { $($variant),* }

        impl $type {
            /// The names accepted in a launch file.
            pub const ACCEPTED: &'static str = concat!($($name, " "),*);

            /// The name in a launch file.
            pub const fn name(self) -> &'static str {
                match self { $($type::$variant => $name),* }
            }
        }

        impl std::str::FromStr for $type {
            type Err = ();

            fn from_str(name: &str) -> Result<Self, ()> {
                match name { $($name => Ok($type::$variant),)* _ => Err(()) }
            }
        }

        impl std::fmt::Display for $type {
            fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                f.write_str(self.name())
            }
        }
    };
}
pub(super) use closed_names;

closed_names!(
    /// Element type of a plain buffer. `E4m3` and `E5m2` are the fp8 formats of the OCP standard.
    BufferType: U8 = "u8", I8 = "i8", U16 = "u16", I16 = "i16", U32 = "u32", I32 = "i32",
    U64 = "u64", I64 = "i64", E4m3 = "e4m3", E5m2 = "e5m2", F16 = "f16", Bf16 = "bf16", F32 = "f32",
    F64 = "f64"
);

/// Initial contents of a buffer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Init {
    Zeros,
    /// Floats in [−1, 1), integers in 0..128, drawn again for every run.
    Random,
    Uninitialised,
    /// 0, 1, 2, ….
    Iota,
    /// One number in every element: its bits, in the low bytes.
    Number(u64),
    /// Integers from `low` to `high`, including both, drawn again for every run.
    Integers {
        low: i64,
        high: i64,
    },
    /// The file with this number (see `LaunchSpec::files`).
    File(usize),
}

/// The accepted forms of `init`.
pub(super) const INITS: &str = "zeros random uninitialised iota, a number, \"inf\", \"-inf\", \"nan\", \
     { integers = [low, high] } or { file = \"x.npy\" }";

/// A file that `init` names.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FileInit {
    /// The key that names the file.
    pub key: String,
    /// The path as written.
    pub path: String,
    pub dtype: BufferType,
}

impl BufferType {
    pub const fn bytes(self) -> usize {
        match self {
            BufferType::U8 | BufferType::I8 | BufferType::E4m3 | BufferType::E5m2 => 1,
            BufferType::U16 | BufferType::I16 | BufferType::F16 | BufferType::Bf16 => 2,
            BufferType::U32 | BufferType::I32 | BufferType::F32 => 4,
            BufferType::U64 | BufferType::I64 | BufferType::F64 => 8,
        }
    }

    pub const fn is_float(self) -> bool {
        matches!(
            self,
            BufferType::E4m3
                | BufferType::E5m2
                | BufferType::F16
                | BufferType::Bf16
                | BufferType::F32
                | BufferType::F64
        )
    }

    /// Half the distance from 1 to the next number; 0 for integers.
    pub const fn unit_roundoff(self) -> f64 {
        match self {
            BufferType::E5m2 => 0.125,
            BufferType::E4m3 => 0.0625,
            BufferType::Bf16 => 0.003_906_25,
            BufferType::F16 => 0.000_488_281_25,
            BufferType::F32 => f32::EPSILON as f64 / 2.0,
            BufferType::F64 => f64::EPSILON / 2.0,
            _ => 0.0,
        }
    }

    /// The smallest and the largest integer of the type; `None` for floats.
    pub fn integers(self) -> Option<(i128, i128)> {
        let bits = 8 * self.bytes() as u32;
        match self {
            BufferType::U8 | BufferType::U16 | BufferType::U32 | BufferType::U64 => {
                Some((0, (1 << bits) - 1))
            }
            BufferType::I8 | BufferType::I16 | BufferType::I32 | BufferType::I64 => {
                Some((-(1 << (bits - 1)), (1 << (bits - 1)) - 1))
            }
            _ => None,
        }
    }

    /// Little-endian bytes of a number, rounded or wrapped to the type.
    pub fn encode(self, value: f64) -> Vec<u8> {
        let float = value as f32;
        match self {
            BufferType::E4m3 | BufferType::E5m2 => vec![self.nearest_fp8(value)],
            BufferType::F16 => half::f16::from_f64(value).to_le_bytes().to_vec(),
            BufferType::Bf16 => half::bf16::from_f64(value).to_le_bytes().to_vec(),
            BufferType::F32 => float.to_le_bytes().to_vec(),
            BufferType::F64 => value.to_le_bytes().to_vec(),
            _ => (value as i128).to_le_bytes()[..self.bytes()].to_vec(),
        }
    }

    /// The number that an element holds. 64-bit integers are rounded.
    ///
    /// # Panics
    /// When `bytes` are fewer than [`BufferType::bytes`].
    pub fn decode(self, bytes: &[u8]) -> f64 {
        let mut word = [0; 8];
        word[..self.bytes()].copy_from_slice(&bytes[..self.bytes()]);
        let bits = u64::from_le_bytes(word);
        match self {
            BufferType::U8 | BufferType::U16 | BufferType::U32 | BufferType::U64 => bits as f64,
            BufferType::I8 => f64::from(bits as u8 as i8),
            BufferType::I16 => f64::from(bits as u16 as i16),
            BufferType::I32 => f64::from(bits as u32 as i32),
            BufferType::I64 => bits as i64 as f64,
            BufferType::E4m3 => fp8(bits as u8, 4, 3),
            BufferType::E5m2 => fp8(bits as u8, 5, 2),
            BufferType::F16 => half::f16::from_bits(bits as u16).to_f64(),
            BufferType::Bf16 => half::bf16::from_bits(bits as u16).to_f64(),
            BufferType::F32 => f64::from(f32::from_bits(bits as u32)),
            BufferType::F64 => f64::from_bits(bits),
        }
    }

    /// The code of the nearest finite number, ties to the even code, as `cvt.rn.satfinite` rounds.
    fn nearest_fp8(self, value: f64) -> u8 {
        if value.is_nan() {
            return 0x7f;
        }
        let sign = if value.is_sign_negative() { 0x80 } else { 0 };
        // A magnitude larger than every number of both formats, for which infinity is nearest to the largest
        // number.
        let magnitude = value.abs().min(1e6);
        let far = |code: u8| (self.decode(&[code]) - magnitude).abs();
        let codes = (0..0x80u8).filter(|&code| self.decode(&[code]).is_finite());
        let best = codes.min_by(|&a, &b| far(a).total_cmp(&far(b)).then((a % 2).cmp(&(b % 2))));
        sign | best.unwrap_or(0)
    }

    /// Maps `unit` in [0, 1) to a number of the type: floats in [−1, 1), integers in 0..128, which every type
    /// can represent.
    pub(crate) fn draw(self, unit: f64) -> f64 {
        if self.is_float() { 2.0 * unit - 1.0 } else { (128.0 * unit).floor() }
    }
}

/// An 8-bit float (OCP 8-bit Floating Point Specification, revision 1.0). E4M3 has no infinity; its one NaN
/// has all bits set.
fn fp8(code: u8, exponent_bits: i32, mantissa_bits: i32) -> f64 {
    let sign = if code & 0x80 == 0 { 1.0 } else { -1.0 };
    let (exponent, mantissa) = (i32::from(code & 0x7f) >> mantissa_bits, code & ((1 << mantissa_bits) - 1));
    let bias = (1 << (exponent_bits - 1)) - 1;
    let fraction = f64::from(mantissa) / f64::from(1 << mantissa_bits);
    match (exponent_bits, exponent, mantissa) {
        (4, 15, 7) => f64::NAN,
        (5, 31, 0) => sign * f64::INFINITY,
        (5, 31, _) => f64::NAN,
        (_, 0, _) => sign * fraction * 2f64.powi(1 - bias),
        _ => sign * (1.0 + fraction) * 2f64.powi(exponent - bias),
    }
}

/// The memory that an argument requests. Files that its `init` names are added to `files`.
pub(super) fn memory_of(
    index: usize,
    raw: &RawArg,
    files: &mut Vec<FileInit>,
) -> Result<Memory, LaunchError> {
    let missing = |key| LaunchError::Missing { index, role: raw.role.clone(), key };
    let key = |key: &str| format!("[[arg]] {index} {key}");
    let dtype = raw.dtype.as_deref().ok_or_else(|| missing("dtype"))?;
    let dtype = dtype_of(key("dtype"), dtype)?;
    let view = view_of(index, raw)?;
    let elements = match (view, raw.elements) {
        (Some(view), None) => view.span().ok_or_else(|| {
            LaunchError::value(key("shape"), format!("{:?}", view.shape()), "at most 2^32 elements")
        })?,
        (Some(_), Some(elements)) => {
            return Err(LaunchError::value(key("elements"), elements, "only one of `elements` and `shape`"));
        }
        (None, None) => return Err(missing("elements")),
        (None, Some(elements)) => usize::try_from(elements)
            .ok()
            .filter(|&n| n > 0)
            .ok_or_else(|| LaunchError::value(key("elements"), elements, "1 or more"))?,
    };
    let init = init_of(&key("init"), raw.init.as_ref(), dtype, files)?;
    Ok(Memory { dtype, elements, init, view })
}

pub(super) fn dtype_of(key: String, name: &str) -> Result<BufferType, LaunchError> {
    let refuse = |()| LaunchError::value(key, format!("\"{name}\""), BufferType::ACCEPTED.trim_end());
    name.parse().map_err(refuse)
}

/// `shape` and `strides` of a buffer.
fn view_of(index: usize, raw: &RawArg) -> Result<Option<View>, LaunchError> {
    let key = |key: &str| format!("[[arg]] {index} {key}");
    // For a tensor map, `strides` are those of the map, in bytes.
    let strides = raw.strides.as_ref().filter(|_| raw.role == "buffer");
    let Some(shape) = &raw.shape else {
        return match strides {
            Some(strides) => {
                Err(LaunchError::value(key("strides"), format!("{strides:?}"), "`shape` beside it"))
            }
            None => Ok(None),
        };
    };
    let extents: Option<Vec<usize>> =
        shape.iter().map(|&n| usize::try_from(n).ok().filter(|&n| n > 0)).collect();
    let extents = extents.filter(|e| (1..=RANK).contains(&e.len())).ok_or_else(|| {
        let accepted = format!("one to {RANK} numbers of 1 or more, outermost first");
        LaunchError::value(key("shape"), format!("{shape:?}"), accepted)
    })?;
    let mut view = View::dense(&extents);
    if let Some(strides) = strides {
        let given: Option<Vec<usize>> = strides.iter().map(|&n| usize::try_from(n).ok()).collect();
        let given = given.filter(|given| given.len() == extents.len()).ok_or_else(|| {
            let accepted = format!("{} numbers of 0 or more, elements, outermost first", extents.len());
            LaunchError::value(key("strides"), format!("{strides:?}"), accepted)
        })?;
        view = View::strided(&extents, &given);
    }
    Ok(Some(view))
}

/// The initial contents that `init` states; uninitialised without `init`.
pub(super) fn init_of(
    key: &str,
    raw: Option<&toml::Value>,
    dtype: BufferType,
    files: &mut Vec<FileInit>,
) -> Result<Init, LaunchError> {
    let Some(raw) = raw else { return Ok(Init::Uninitialised) };
    let refuse = |accepted: &str| LaunchError::value(key, raw, accepted);
    let number = |value: f64| {
        let mut bits = [0; 8];
        bits[..dtype.bytes()].copy_from_slice(&dtype.encode(value));
        Init::Number(u64::from_le_bytes(bits))
    };
    match raw {
        toml::Value::String(name) => match name.as_str() {
            "zeros" => Ok(Init::Zeros),
            "random" => Ok(Init::Random),
            "uninitialised" => Ok(Init::Uninitialised),
            "iota" => Ok(Init::Iota),
            "inf" | "-inf" | "nan" if !dtype.is_float() => {
                Err(refuse("a whole number, since the dtype is one of integers"))
            }
            "inf" => Ok(number(f64::INFINITY)),
            "-inf" => Ok(number(f64::NEG_INFINITY)),
            "nan" => Ok(number(f64::NAN)),
            _ => Err(refuse(INITS)),
        },
        toml::Value::Integer(value) => match dtype.integers() {
            Some((low, high)) if !(low..=high).contains(&i128::from(*value)) => {
                Err(refuse(&format!("{low} to {high}, which {dtype} holds")))
            }
            Some(_) => {
                let bytes = value.to_le_bytes();
                let mut bits = [0; 8];
                bits[..dtype.bytes()].copy_from_slice(&bytes[..dtype.bytes()]);
                Ok(Init::Number(u64::from_le_bytes(bits)))
            }
            None => Ok(number(*value as f64)),
        },
        toml::Value::Float(value) if dtype.is_float() => Ok(number(*value)),
        toml::Value::Float(_) => Err(refuse("a whole number, since the dtype is one of integers")),
        toml::Value::Table(table) if table.len() == 1 => match (table.get("integers"), table.get("file")) {
            (Some(range), _) => integers_of(range, dtype)
                .ok_or_else(|| refuse("{ integers = [low, high] }, two whole numbers of the dtype in order")),
            (_, Some(toml::Value::String(path))) => {
                files.push(FileInit { key: key.to_owned(), path: path.clone(), dtype });
                Ok(Init::File(files.len() - 1))
            }
            _ => Err(refuse(INITS)),
        },
        _ => Err(refuse(INITS)),
    }
}

fn integers_of(range: &toml::Value, dtype: BufferType) -> Option<Init> {
    let [low, high] = range.as_array()?.as_slice() else { return None };
    let (low, high) = (low.as_integer()?, high.as_integer()?);
    let holds = |n: i64| dtype.integers().is_none_or(|(least, most)| (least..=most).contains(&i128::from(n)));
    (low <= high && holds(low) && holds(high)).then_some(Init::Integers { low, high })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn eight_bit_floats_are_those_of_the_standard() {
        for (dtype, code, value) in [
            (BufferType::E4m3, 0x7e, 448.0),
            (BufferType::E4m3, 0x08, 0.015_625),
            (BufferType::E4m3, 0x01, 0.001_953_125),
            (BufferType::E5m2, 0x7b, 57_344.0),
            (BufferType::E5m2, 0x01, 1.525_878_906_25e-5),
        ] {
            assert_eq!(dtype.decode(&[code]), value, "{dtype} {code:#x}");
            assert_eq!(dtype.encode(-value), [code | 0x80], "{dtype} {code:#x}");
        }
        assert_eq!(BufferType::E4m3.encode(1e9), [0x7e], "beyond the largest number");
        // 17 lies between 16 (code 0x58) and 18 (0x59).
        assert_eq!(BufferType::E4m3.encode(17.0), [0x58]);
        assert!(BufferType::E4m3.decode(&[0x7f]).is_nan() && BufferType::E5m2.decode(&[0xfc]).is_infinite());
    }

    #[test]
    fn places_follow_the_strides() {
        let mut view = View::dense(&[2, 3]);
        assert_eq!(view.places().collect::<Vec<_>>(), [0, 1, 2, 3, 4, 5]);
        view.strides[..2].copy_from_slice(&[1, 4]);
        assert_eq!(view.places().collect::<Vec<_>>(), [0, 4, 8, 1, 5, 9]);
        assert_eq!(view.span(), Some(10));
    }
}
