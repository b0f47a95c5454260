//! Tensor maps as data (PTX ISA, "Tensors"): the layout of a tensor and of the box that a bulk tensor copy
//! moves. A machine encodes a map when it launches a kernel.

use crate::BufferSpec;

/// Element types of a tensor map.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, serde::Deserialize)]
#[serde(rename_all = "lowercase")]
#[allow(missing_docs, reason = "self-evident")]
pub enum Element {
    U8,
    U16,
    U32,
    I32,
    U64,
    I64,
    F16,
    Bf16,
    F32,
    F64,
}

impl Element {
    /// Size in bytes.
    pub const fn bytes(self) -> u32 {
        match self {
            Element::U8 => 1,
            Element::U16 | Element::F16 | Element::Bf16 => 2,
            Element::U32 | Element::I32 | Element::F32 => 4,
            Element::U64 | Element::I64 | Element::F64 => 8,
        }
    }
}

/// How the 16-byte chunks of a box are permuted in shared memory, named by the bytes of a row: chunk `i` of
/// row `r` goes to chunk `i xor (r mod rows)` of rows of that many bytes (PTX ISA, "Tensors: Swizzling
/// Modes").
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, serde::Deserialize)]
#[allow(missing_docs, reason = "self-evident")]
pub enum Swizzle {
    #[serde(rename = "none")]
    None,
    #[serde(rename = "32")]
    Bytes32,
    #[serde(rename = "64")]
    Bytes64,
    #[serde(rename = "128")]
    Bytes128,
}

impl Swizzle {
    /// The maximum length in bytes of a row of the box, which is also the span of the permutation. `None`
    /// without a swizzle.
    pub const fn span(self) -> Option<u32> {
        match self {
            Swizzle::None => None,
            Swizzle::Bytes32 => Some(32),
            Swizzle::Bytes64 => Some(64),
            Swizzle::Bytes128 => Some(128),
        }
    }
}

/// The granularity at which a load brings a box to L2.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[allow(missing_docs, reason = "self-evident")]
pub enum L2Promotion {
    None,
    Bytes64,
    #[default]
    Bytes128,
    Bytes256,
}

/// A tensor in a buffer, and the box that one instruction copies. Dimensions come innermost first. Elements
/// outside the tensor read as zero and are not written.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct TensorMapSpec {
    /// Index into [`Kernel::buffers`](crate::Kernel::buffers).
    pub buffer: usize,
    /// Bytes from the buffer's start to element (0, 0, …). In a map that wraps this element can lie before
    /// the buffer.
    pub offset: u64,
    /// Type of an element.
    pub element: Element,
    /// Elements along each of 1 to 5 dimensions.
    pub extents: Vec<u64>,
    /// Bytes between neighbours along each dimension except the innermost, which is contiguous.
    pub strides: Vec<u64>,
    /// Elements of the box along each dimension.
    pub box_extents: Vec<u32>,
    /// The permutation of the box in shared memory.
    pub swizzle: Swizzle,
    /// The granularity at which a load brings data to L2.
    pub l2_promotion: L2Promotion,
    /// Whether coordinates, and not the extents, keep copies inside the buffer: addresses are taken modulo
    /// 2^64, so that a coordinate can undo what the stride of another one adds. The extents then say nothing
    /// about the size of the buffer.
    pub wraps: bool,
}

/// Why a tensor map is invalid.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("tensor map{}: invalid value '{value}' for {field}: expected {accepted}", of_buffer(.buffer.as_deref()))]
pub struct TensorMapError {
    /// The name of the buffer, if known.
    pub buffer: Option<String>,
    /// The invalid field.
    pub field: &'static str,
    /// The value given.
    pub value: String,
    /// The accepted values.
    pub accepted: String,
}

impl TensorMapError {
    /// This error with the name of the buffer.
    #[must_use]
    pub fn of(self, buffer: &str) -> TensorMapError {
        TensorMapError { buffer: Some(buffer.to_owned()), ..self }
    }
}

fn of_buffer(name: Option<&str>) -> String {
    name.map_or(String::new(), |name| format!(" of {name}"))
}

impl TensorMapSpec {
    /// Size in bytes of an encoded map, and of the kernel parameter that holds it.
    pub const BYTES: u32 = 128;
    /// Alignment in bytes of the kernel parameter that holds a map.
    pub const ALIGN: u32 = 64;

    /// Bytes that one copy of the box moves, which the mbarrier must expect. The count includes elements
    /// outside the tensor.
    pub fn box_bytes(&self) -> u32 {
        self.box_extents.iter().fold(self.element.bytes(), |bytes, &n| bytes.saturating_mul(n))
    }

    /// Bytes from element (0, 0, …) to the end of the last element of the tensor; of its first row in a map
    /// that wraps.
    pub fn reach(&self) -> u128 {
        let bytes = u128::from(self.element.bytes());
        let inner = self.extents.first().map_or(0, |&n| u128::from(n) * bytes);
        if self.wraps {
            return inner;
        }
        let outer = self.extents.iter().skip(1).zip(&self.strides);
        outer.fold(inner, |sum, (&n, &stride)| sum + u128::from(n.saturating_sub(1)) * u128::from(stride))
    }

    /// Checks everything that does not depend on the buffer, by the rules of `cuTensorMapEncodeTiled` (CUDA
    /// Driver API, "Tensor Map Object Management").
    ///
    /// # Errors
    /// A [`TensorMapError`] that names the field, its value and what is accepted.
    pub fn check(&self) -> Result<(), TensorMapError> {
        let rank = self.extents.len();
        accept("rank", rank, (1..=5).contains(&rank), "1 to 5 dimensions")?;
        accept("strides", self.strides.len(), self.strides.len() + 1 == rank, "one fewer than dimensions")?;
        let boxes = self.box_extents.len();
        accept("box_extents", boxes, boxes == rank, "one per dimension")?;
        accept("offset in bytes", self.offset, self.offset.is_multiple_of(16), "multiples of 16")?;
        for &extent in &self.extents {
            accept("extent", extent, (1..=1 << 32).contains(&extent), "1 to 2^32")?;
        }
        for &stride in &self.strides {
            let fits = stride.is_multiple_of(16) && stride < 1 << 40;
            accept("stride in bytes", stride, fits, "multiples of 16 below 2^40")?;
        }
        for &extent in &self.box_extents {
            accept("box extent", extent, (1..=256).contains(&extent), "1 to 256")?;
        }
        let row = self.box_extents[0] * self.element.bytes();
        accept("box row in bytes", row, row.is_multiple_of(16), "multiples of 16")?;
        match self.swizzle.span() {
            Some(span) => {
                accept("box row in bytes", row, row <= span, &format!("up to {span} with this swizzle"))
            }
            None => Ok(()),
        }
    }

    /// Like [`TensorMapSpec::check`]; also checks that the tensor lies inside its buffer.
    ///
    /// # Errors
    /// A [`TensorMapError`] that names the buffer, the field, its value and what is accepted.
    pub fn check_in(&self, buffers: &[BufferSpec]) -> Result<(), TensorMapError> {
        let known = format!("0 to {}", buffers.len().saturating_sub(1));
        accept("buffer", self.buffer, self.buffer < buffers.len(), &known)?;
        let BufferSpec { name, bytes, .. } = &buffers[self.buffer];
        let is_before = self.wraps && self.offset > i64::MAX as u64;
        let needed = if is_before { 0 } else { u128::from(self.offset) + self.reach() };
        let reached = format!("at least {needed}, which the extents reach");
        self.check()
            .and_then(|()| accept("buffer's bytes", bytes, needed <= *bytes as u128, &reached))
            .map_err(|error| error.of(name))
    }
}

fn accept(
    field: &'static str,
    value: impl ToString,
    fits: bool,
    accepted: &str,
) -> Result<(), TensorMapError> {
    if fits {
        return Ok(());
    }
    Err(TensorMapError { buffer: None, field, value: value.to_string(), accepted: accepted.to_owned() })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Access;

    fn spec() -> TensorMapSpec {
        TensorMapSpec {
            buffer: 0,
            offset: 0,
            element: Element::F16,
            extents: vec![64, 512],
            strides: vec![128],
            box_extents: vec![64, 128],
            swizzle: Swizzle::Bytes128,
            l2_promotion: L2Promotion::default(),
            wraps: false,
        }
    }

    #[test]
    fn refusals_name_the_field() {
        let buffers = [BufferSpec { name: "k".into(), bytes: 512 * 128, access: Access::Read }];
        assert_eq!(spec().check_in(&buffers), Ok(()));
        assert_eq!((spec().box_bytes(), spec().reach()), (128 * 128, 512 * 128));
        let before = TensorMapSpec { offset: 16u64.wrapping_neg(), wraps: true, ..spec() };
        assert_eq!(before.check_in(&buffers), Ok(()));
        type Change = fn(&mut TensorMapSpec);
        let cases: [(Change, &str); 11] = [
            (|s| s.extents.clear(), "invalid value '0' for rank"),
            (|s| s.strides.push(16), "invalid value '2' for strides"),
            (|s| s.box_extents.truncate(1), "invalid value '1' for box_extents"),
            (|s| s.offset = 8, "invalid value '8' for offset in bytes"),
            (|s| s.extents[1] = 0, "invalid value '0' for extent"),
            (|s| s.strides[0] = 24, "invalid value '24' for stride in bytes"),
            (|s| s.box_extents[1] = 257, "invalid value '257' for box extent"),
            (|s| s.box_extents[0] = 4, "invalid value '8' for box row in bytes: expected multiples of 16"),
            (|s| s.swizzle = Swizzle::Bytes64, "invalid value '128' for box row in bytes: expected up to 64"),
            (|s| s.extents[1] = 513, "invalid value '65536' for buffer's bytes: expected at least 65664"),
            (|s| s.buffer = 1, "invalid value '1' for buffer: expected 0 to 0"),
        ];
        for (change, expected) in cases {
            let mut spec = spec();
            change(&mut spec);
            let error = spec.check_in(&buffers).unwrap_err().to_string();
            assert!(error.contains(expected), "{error}");
        }
    }
}
