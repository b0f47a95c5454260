//! Tensor maps in a launch file.

use problem::{DType, Problem, Tensor};
use ptx::{Access, BufferSpec, Element, L2Promotion, Swizzle, TensorMapError, TensorMapSpec};

use super::LaunchError;
use super::memory::{BufferType, FileInit, Memory, dtype_of, memory_of};
use super::raw::RawArg;
use super::spec::{number_of, refuse_surplus, tensor_of};

/// A tensor map and its memory.
#[derive(Clone, Debug, PartialEq)]
pub struct MapSpec {
    pub target: MapTarget,
    /// Whether the kernel takes the address of the map in global memory instead of the map by value.
    pub in_memory: bool,
    /// The map. Its buffer number is known only after binding to a module.
    map: TensorMapSpec,
}

/// The memory of a tensor map.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum MapTarget {
    Tensor(Tensor),
    /// The buffer of the argument with this number.
    Argument(usize),
    /// Memory to which only this map refers.
    Own(Memory),
}

impl MapSpec {
    /// The memory to which only this map refers, if any.
    pub(super) const fn own_memory(&self) -> Option<Memory> {
        match self.target {
            MapTarget::Own(memory) => Some(memory),
            MapTarget::Tensor(_) | MapTarget::Argument(_) => None,
        }
    }

    /// The map for the buffer with this number.
    pub(super) fn in_buffer(&self, buffer: usize) -> TensorMapSpec {
        TensorMapSpec { buffer, ..self.map.clone() }
    }

    /// Checks that the hardware supports the map for memory of this size.
    ///
    /// # Errors
    /// The unsupported property, with the accepted values.
    pub(super) fn check(&self, bytes: usize) -> Result<(), TensorMapError> {
        let memory = BufferSpec { name: String::new(), bytes, access: Access::ReadWrite };
        // The map's position in the file identifies the buffer.
        self.map.check_in(&[memory]).map_err(|error| TensorMapError { buffer: None, ..error })
    }
}

/// The shape of a map: elements, and byte strides of all dimensions but the innermost.
struct Shape {
    dims: Vec<u64>,
    strides: Vec<u64>,
}

impl Shape {
    /// The shape of a problem's tensor, innermost dimension first.
    fn of_tensor(problem: &Problem, tensor: Tensor) -> Shape {
        let [batch, heads, rows, columns] = problem.extents(tensor).map(|n| n as u64);
        let strides = problem.strides(tensor);
        let bytes =
            |elements: i64| elements.unsigned_abs().saturating_mul(problem.dtypes.of(tensor).bytes() as u64);
        Shape {
            dims: vec![columns, rows, heads, batch],
            strides: [strides.row, strides.head, strides.batch].map(bytes).to_vec(),
        }
    }

    /// The shape of elements without gaps.
    fn dense(dims: Vec<u64>, element: Element) -> Shape {
        let inner = dims.split_last().map_or(&[][..], |(_, inner)| inner);
        let strides = inner.iter().scan(u64::from(element.bytes()), |bytes, &extent| {
            *bytes = bytes.saturating_mul(extent);
            Some(*bytes)
        });
        Shape { strides: strides.collect(), dims }
    }
}

/// The map that an argument requests. Hardware limits are checked when all arguments are known.
pub(super) fn map_of(
    index: usize,
    all: &[RawArg],
    problem: Option<&Problem>,
    files: &mut Vec<FileInit>,
) -> Result<MapSpec, LaunchError> {
    const KEYS: [&str; 7] = ["dims", "strides", "offset", "box", "swizzle", "fill", "memory"];
    let raw = &all[index];
    let key = |name: &str| format!("[[arg]] {index} {name}");
    let (target, element) = target_of(index, all, problem, files)?;
    let keys: &[&str] = match target {
        MapTarget::Tensor(_) => &["of", "layout"],
        MapTarget::Argument(_) => &["of", "dtype"],
        MapTarget::Own(_) => &["dtype", "elements", "shape", "init"],
    };
    refuse_surplus(index, raw, &[keys, &KEYS].concat())?;
    let missing = |key| LaunchError::Missing { index, role: raw.role.clone(), key };
    let dims = raw.dims.as_ref().map(|dims| sizes(key("dims"), dims)).transpose()?;
    let mut shape = match (target, problem, dims) {
        (_, _, Some(dims)) => Shape::dense(dims, element),
        (MapTarget::Tensor(tensor), Some(problem), None) => Shape::of_tensor(problem, tensor),
        (_, _, None) => return Err(missing("dims")),
    };
    if let Some(strides) = &raw.strides {
        shape.strides = sizes(key("strides"), strides)?;
    }
    let box_extents = raw.box_extents.as_ref().ok_or_else(|| missing("box"))?;
    let box_extents = sizes(key("box"), box_extents)?;
    let swizzle = raw.swizzle.as_deref().unwrap_or("none");
    let swizzle = match swizzle {
        "none" => Swizzle::None,
        "32" => Swizzle::Bytes32,
        "64" => Swizzle::Bytes64,
        "128" => Swizzle::Bytes128,
        other => {
            return Err(LaunchError::value(key("swizzle"), format!("\"{other}\""), "none, 32, 64, 128"));
        }
    };
    if let Some(fill) = raw.fill.as_deref().filter(|fill| *fill != "zeros") {
        return Err(LaunchError::value(key("fill"), format!("\"{fill}\""), "zeros, which every type has"));
    }
    let in_memory = match raw.memory.as_deref() {
        None | Some("param") => false,
        Some("global") => true,
        Some(other) => {
            return Err(LaunchError::value(key("memory"), format!("\"{other}\""), "param, global"));
        }
    };
    let offset = raw.offset.unwrap_or(0);
    let map = TensorMapSpec {
        buffer: 0,
        offset: u64::try_from(offset).map_err(|_| LaunchError::value(key("offset"), offset, "0 or more"))?,
        element,
        extents: shape.dims,
        strides: shape.strides,
        // Extents beyond u32 saturate and are rejected later.
        box_extents: box_extents.into_iter().map(|n| u32::try_from(n).unwrap_or(u32::MAX)).collect(),
        swizzle,
        l2_promotion: L2Promotion::default(),
        wraps: false,
    };
    Ok(MapSpec { target, in_memory, map })
}

/// Converts numbers that must not be negative.
fn sizes(key: String, values: &[i64]) -> Result<Vec<u64>, LaunchError> {
    values.iter().map(|&n| u64::try_from(n)).collect::<Result<_, _>>().map_err(|_| {
        LaunchError::value(key, format!("{values:?}"), "numbers that are not negative, innermost first")
    })
}

/// The memory of a map and the type of its elements.
fn target_of(
    index: usize,
    all: &[RawArg],
    problem: Option<&Problem>,
    files: &mut Vec<FileInit>,
) -> Result<(MapTarget, Element), LaunchError> {
    let Some(of) = &all[index].of else {
        let memory = memory_of(index, &all[index], files)?;
        return Ok((MapTarget::Own(memory), element_of(memory.dtype)));
    };
    let refuse = |accepted: &str| LaunchError::value(format!("[[arg]] {index} of"), of, accepted);
    let named = number_of(of, all).is_some_and(|at| all[at].role == "buffer");
    if let Some(tensor) = of.as_str().and_then(tensor_of).filter(|_| !named) {
        let problem = problem.ok_or_else(|| refuse("tensors only with a [problem] table"))?;
        let element = match problem.dtypes.of(tensor) {
            DType::F16 => Element::F16,
            DType::Bf16 => Element::Bf16,
            DType::F32 => Element::F32,
            DType::E4m3 | DType::E5m2 => Element::U8,
        };
        return Ok((MapTarget::Tensor(tensor), element));
    }
    let buffer = number_of(of, all).and_then(|n| Some((n, all.get(n).filter(|arg| arg.role == "buffer")?)));
    let (number, buffer) = buffer.ok_or_else(|| {
        refuse("q, k, v, out, or the number or name of an [[arg]] with role = \"buffer\", from 0 on")
    })?;
    let dtype = match &all[index].dtype {
        Some(dtype) => dtype_of(format!("[[arg]] {index} dtype"), dtype)?,
        // The files of the buffer's own argument are listed there.
        None => memory_of(number, buffer, &mut Vec::new())?.dtype,
    };
    Ok((MapTarget::Argument(number), element_of(dtype)))
}

/// The hardware's type of a buffer's elements. Signed 8- and 16-bit types have no names there; copies do not
/// depend on the sign.
const fn element_of(dtype: BufferType) -> Element {
    match dtype {
        BufferType::U8 | BufferType::I8 | BufferType::E4m3 | BufferType::E5m2 => Element::U8,
        BufferType::U16 | BufferType::I16 => Element::U16,
        BufferType::U32 => Element::U32,
        BufferType::I32 => Element::I32,
        BufferType::U64 => Element::U64,
        BufferType::I64 => Element::I64,
        BufferType::F16 => Element::F16,
        BufferType::Bf16 => Element::Bf16,
        BufferType::F32 => Element::F32,
        BufferType::F64 => Element::F64,
    }
}
