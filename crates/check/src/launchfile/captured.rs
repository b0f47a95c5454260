//! Writes the launch file of a captured launch.

use std::fmt::Write;

use capture::{Record, RecordedMap, protocol};
use half::f16;
use ptx::{Function, Module, Param, TensorMapSpec, Type};

use super::BufferType;
use super::suggest::accessed;
use crate::names::demangle;

/// Why a captured launch has no launch file.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum CaptureError {
    #[error("the PTX has no entry {kernel}")]
    Entry {
        /// The name in the module.
        kernel: String,
    },
    #[error(
        "the PTX is that of another build of the kernel: its parameters have {stated} bytes, those of the \
         launch {given}"
    )]
    Params {
        /// The sizes in the PTX, printed.
        stated: String,
        /// The sizes in the launch, printed.
        given: String,
    },
    #[error("parameter {param} has a tensor map with {property}, which launch files lack")]
    Map {
        /// The number of the parameter, from 0.
        param: usize,
        /// The property, with its value.
        property: String,
    },
    #[error(
        "the tensor map of parameter {param} is of memory at {address:#x}, which the driver does not know"
    )]
    Memory {
        /// The number of the parameter, from 0.
        param: usize,
        address: u64,
    },
}

/// The launch file of a captured launch.
#[derive(Clone, Debug, PartialEq)]
pub struct CapturedLaunch {
    pub text: String,
    /// The element type of each buffer's files.
    pub types: Vec<BufferType>,
}

/// Writes the launch file. `tables` are the places in each buffer, in bytes, where an address stands, with
/// the address. `changed` are the buffers whose contents after the launch are to judge the kernel.
///
/// # Errors
/// When launch files lack a feature of the launch, or when the PTX is not that of the kernel.
pub fn captured(
    record: &Record,
    module: &Module,
    tables: &[Vec<(usize, u64)>],
    changed: &[usize],
) -> Result<CapturedLaunch, CaptureError> {
    let entry = module.entries().find(|entry| *entry.name == *record.kernel);
    let entry = entry.ok_or_else(|| CaptureError::Entry { kernel: record.kernel.clone() })?;
    check_sizes(record, entry)?;
    let types = types(record, entry);
    let mut text = head(record);
    for (index, (buffer, ty)) in record.buffers.iter().zip(&types).enumerate() {
        let elements = buffer.bytes / ty.bytes();
        let _ = write!(
            text,
            "\n[[arg]]\nname = \"m{index}\"\nrole = \"buffer\"\nparameter = false\ndtype = \"{ty}\"\n\
             elements = {elements}\ninit = {{ file = \"{}\" }}\n",
            buffer.file
        );
        let words = tables.get(index).into_iter().flatten();
        let addresses =
            words.filter_map(|&(at, address)| Some(format!("{{ at = {at}, {} }}", target(record, address)?)));
        let addresses: Vec<String> = addresses.collect();
        if !addresses.is_empty() {
            let _ = writeln!(text, "addresses = [{}]", addresses.join(", "));
        }
    }
    let mut maps = Vec::new();
    for (number, map) in record.maps.iter().enumerate() {
        // A map that is a whole parameter stands there; one inside a struct is an argument of its own.
        let table = map_table(record, map)?;
        let is_whole = map.at == 0 && record.params[map.param].bytes.len() == TensorMapSpec::BYTES as usize;
        if !is_whole {
            let _ = write!(text, "\n[[arg]]\nname = \"map{number}\"\nparameter = false\n{table}");
        }
        maps.push((map, table, is_whole));
    }
    for (index, (given, param)) in record.params.iter().zip(&entry.params).enumerate() {
        let _ = write!(text, "\n[[arg]]  # {}\n", demangle(&param.name));
        let whole = maps.iter().find(|(map, _, is_whole)| map.param == index && *is_whole);
        text += &match (whole, param.elements) {
            (Some((_, table, _)), _) => table.clone(),
            (None, Some(_)) => structure(record, index, &given.bytes),
            (None, None) => scalar(record, param, &given.bytes),
        };
    }
    for index in changed {
        let after = record.buffers[*index].after.as_deref().unwrap_or_default();
        let _ = write!(text, "\n[[reference]]  # as on the GPU\noutput = \"m{index}\"\nfile = \"{after}\"\n");
    }
    Ok(CapturedLaunch { text, types })
}

fn head(record: &Record) -> String {
    let Record { kernel, number, grid, block, cluster, dynamic_shared, cooperative, .. } = record;
    let graph = if record.in_graph {
        "# The launch went into a CUDA graph: the contents are those at the time of the capture.\n"
    } else {
        ""
    };
    format!(
        "# Launch {number} of {}, captured on a device of sm_{}.\n{graph}\n[launch]\nentry = \"{kernel}\"\n\
         grid = {grid:?}\nblock = {block:?}\ncluster = {cluster:?}\ndynamic_shared = {dynamic_shared}\n\
         cooperative = {cooperative}\n",
        demangle(kernel),
        record.capability,
    )
}

fn check_sizes(record: &Record, entry: &Function) -> Result<(), CaptureError> {
    let stated: Vec<usize> = entry.params.iter().map(|param| param.bytes() as usize).collect();
    let given: Vec<usize> = record.params.iter().map(|param| param.bytes.len()).collect();
    if stated == given {
        return Ok(());
    }
    Err(CaptureError::Params { stated: format!("{stated:?}"), given: format!("{given:?}") })
}

/// The element type of each buffer: that of the kernel's first access by way of a parameter.
fn types(record: &Record, entry: &Function) -> Vec<BufferType> {
    let mut types = vec![BufferType::U8; record.buffers.len()];
    for ((param, at), ty) in accessed(entry) {
        let word = record.params.get(param).zip(usize::try_from(at).ok()).and_then(|(param, at)| {
            param.bytes.get(at..at.checked_add(8)?)?.try_into().ok().map(u64::from_le_bytes)
        });
        let Some((buffer, _)) = word.and_then(|word| record.place(word)) else { continue };
        // NumPy has no bf16: the bits are kept.
        let ty = if ty == "bf16" { "u16" } else { ty };
        if let Ok(ty) = ty.parse::<BufferType>()
            && types[buffer] == BufferType::U8
            && record.buffers[buffer].bytes.is_multiple_of(ty.bytes())
        {
            types[buffer] = ty;
        }
    }
    types
}

/// The keys that name an address inside a buffer.
fn target(record: &Record, address: u64) -> Option<String> {
    let (buffer, plus) = record.place(address)?;
    Some(if plus == 0 { format!("of = \"m{buffer}\"") } else { format!("of = \"m{buffer}\", plus = {plus}") })
}

fn word(bytes: &[u8]) -> u64 {
    bytes.iter().rev().fold(0, |value, byte| value << 8 | u64::from(*byte))
}

/// A parameter that is no array: an address or a number.
fn scalar(record: &Record, param: &Param, bytes: &[u8]) -> String {
    let bits = word(bytes);
    if let Some((buffer, plus)) = (bytes.len() == 8).then(|| record.place(bits)).flatten() {
        return format!("role = \"pointer\"\nof = \"m{buffer}\"\nplus = {plus}\n");
    }
    let (role, value) = match (param.ty, bytes.len()) {
        (Type::F32, _) => ("f32", format!("{:?}", f32::from_bits(bits as u32))),
        (Type::F64, _) => ("f64", format!("{:?}", f64::from_bits(bits))),
        (Type::F16, _) => ("f16", format!("{:?}", f16::from_bits(bits as u16).to_f32())),
        (Type::S32, _) => ("i32", (bits as i32).to_string()),
        (_, 1) => ("u8", bits.to_string()),
        (_, 2) => ("u16", bits.to_string()),
        (_, 4) => ("u32", bits.to_string()),
        // TOML's integers are signed 64-bit numbers.
        _ => ("i64", (bits as i64).to_string()),
    };
    // TOML has other names for NaN and infinity than Rust.
    format!("role = \"{role}\"\nvalue = {}\n", value.replace("NaN", "nan"))
}

/// A struct: its tensor maps and addresses, and the rest as numbers of four bytes or as bytes.
fn structure(record: &Record, index: usize, bytes: &[u8]) -> String {
    let mut text = format!("role = \"struct\"\nbytes = {}\nfields = [\n", bytes.len());
    let mut plain = 0..0;
    let mut at = 0;
    let flush = |text: &mut String, plain: std::ops::Range<usize>| {
        let words = plain.start..plain.end - plain.len() % 4;
        if !words.is_empty() {
            let values: Vec<String> =
                bytes[words.clone()].chunks(4).map(|four| word(four).to_string()).collect();
            let _ = writeln!(
                text,
                "    {{ role = \"u32\", offset = {}, value = [{}] }},",
                words.start,
                values.join(", ")
            );
        }
        if words.end < plain.end {
            let rest = &bytes[words.end..plain.end];
            let _ = writeln!(text, "    {{ role = \"bytes\", offset = {}, value = {rest:?} }},", words.end);
        }
    };
    while at < bytes.len() {
        let map = record.maps.iter().position(|map| (map.param, map.at) == (index, at));
        let address = bytes.get(at..at + 8).map(word).and_then(|word| target(record, word));
        let (field, size) = match (map, address) {
            (Some(map), _) => {
                (format!("role = \"tensor_map\", of = \"map{map}\""), TensorMapSpec::BYTES as usize)
            }
            (None, Some(target)) => (format!("role = \"pointer\", {target}"), 8),
            (None, None) => {
                let size = 8.min(bytes.len() - at);
                plain = if plain.end == at { plain.start..at + size } else { at..at + size };
                at += size;
                continue;
            }
        };
        flush(&mut text, std::mem::replace(&mut plain, 0..0));
        let _ = writeln!(text, "    {{ {field}, offset = {at} }},");
        at += size;
    }
    flush(&mut text, plain);
    text + "]\n"
}

/// The names of `CUtensorMapDataType` in a launch file. tf32 is f32 here.
const ELEMENTS: [&str; 13] =
    ["u8", "u16", "u32", "i32", "u64", "i64", "f16", "f32", "f64", "bf16", "f32", "f32", "f32"];
/// The names of `CUtensorMapSwizzle`.
const SWIZZLES: [&str; 4] = ["none", "32", "64", "128"];

fn map_table(record: &Record, map: &RecordedMap) -> Result<String, CaptureError> {
    let lacks = |property: String| CaptureError::Map { param: map.param, property };
    if map.im2col {
        return Err(lacks("the mode im2col".to_owned()));
    }
    for (name, value) in [("interleave", map.interleave), ("fill", map.fill)] {
        if value != 0 {
            return Err(lacks(format!("{name} {value}")));
        }
    }
    if map.element_strides.iter().any(|&step| step != 1) {
        return Err(lacks(format!("element strides {:?}", map.element_strides)));
    }
    let name = |names: &'static [&str], value: u32, property: &str| {
        names.get(value as usize).copied().ok_or_else(|| lacks(format!("{property} {value}")))
    };
    let dtype = name(&ELEMENTS, map.element, "element type")?;
    let swizzle = name(&SWIZZLES, map.swizzle, "swizzle")?;
    let place = record.place(map.address);
    let (buffer, offset) = place.ok_or(CaptureError::Memory { param: map.param, address: map.address })?;
    let RecordedMap { dims, strides, box_extents, .. } = map;
    Ok(format!(
        "role = \"tensor_map\"\nof = \"m{buffer}\"\ndtype = \"{dtype}\"\noffset = {offset}\ndims = {dims:?}\n\
         strides = {strides:?}\nbox = {box_extents:?}\nswizzle = \"{swizzle}\"\n"
    ))
}

impl BufferType {
    /// The name in the header of a `.npy` file; of types that NumPy lacks, that of bytes.
    fn descr(self) -> &'static str {
        match self {
            BufferType::U8 | BufferType::E4m3 | BufferType::E5m2 => "|u1",
            BufferType::I8 => "|i1",
            BufferType::U16 | BufferType::Bf16 => "<u2",
            BufferType::I16 => "<i2",
            BufferType::U32 => "<u4",
            BufferType::I32 => "<i4",
            BufferType::U64 => "<u8",
            BufferType::I64 => "<i8",
            BufferType::F16 => "<f2",
            BufferType::F32 => "<f4",
            BufferType::F64 => "<f8",
        }
    }

    /// The header of a file of a captured buffer.
    pub fn captured_header(self, bytes: usize) -> Vec<u8> {
        protocol::header(self.descr(), bytes / self.bytes())
    }
}

#[cfg(test)]
mod tests {
    use capture::{RecordedBuffer, RecordedParam};

    use super::super::LaunchSpec;
    use super::*;

    fn hexadecimal(words: &[u64]) -> RecordedParam {
        RecordedParam { bytes: words.iter().flat_map(|word| word.to_le_bytes()).collect() }
    }

    fn record() -> Record {
        let buffer = |address, bytes, file: &str| RecordedBuffer {
            address,
            bytes,
            file: format!("{file}.npy"),
            after: Some(format!("{file}.after.npy")),
        };
        Record {
            kernel: "k".to_owned(),
            number: 3,
            in_graph: false,
            grid: [2, 1, 1],
            block: [32, 1, 1],
            cluster: [1, 1, 1],
            dynamic_shared: 64,
            cooperative: false,
            capability: 90,
            image: String::new(),
            params: Vec::new(),
            buffers: vec![buffer(0x1_0000_0000, 256, "m0"), buffer(0x2_0000_0000, 16384, "m1")],
            maps: Vec::new(),
            refused: None,
        }
    }

    const TEXT: &str = "
.version 8.0
.target sm_90
.address_size 64
.visible .entry k(.param .u64 x, .param .align 64 .b8 s[208], .param .f32 f, .param .align 64 .b8 m[128])
{
    .reg .b64 %d<2>; .reg .f32 %f<2>;
    ld.param.u64 %d0, [x];
    ld.global.f32 %f0, [%d0];
    st.global.f32 [%d0], %f0;
    ret;
}";

    fn map(param: usize, at: usize) -> RecordedMap {
        RecordedMap {
            param,
            at,
            address: 0x2_0000_0000,
            element: 9,
            interleave: 0,
            swizzle: 3,
            fill: 0,
            im2col: false,
            dims: vec![64, 128],
            strides: vec![128],
            box_extents: vec![64, 64],
            element_strides: vec![1, 1],
        }
    }

    fn complete() -> Record {
        let struct_words = [&[0; 16][..], &[5, 0x2_0000_0000, 7, 8, 9, 10, 11, 0x1_0000_0010, 0, 1]].concat();
        let number = RecordedParam { bytes: f32::NEG_INFINITY.to_le_bytes().to_vec() };
        let params =
            vec![hexadecimal(&[0x1_0000_0004]), hexadecimal(&struct_words), number, hexadecimal(&[0; 16])];
        Record { params, maps: vec![map(1, 0), map(3, 0)], ..record() }
    }

    #[test]
    fn a_launch_file_has_the_addresses_numbers_and_maps_of_the_launch() {
        let module = ptx::parse(TEXT).unwrap();
        let tables = [vec![(8, 0x2_0000_0040)], Vec::new()];
        let launch = captured(&complete(), &module, &tables, &[0]).unwrap();
        assert_eq!(launch.types, [BufferType::F32, BufferType::U8]);
        let spec: LaunchSpec = launch.text.parse().unwrap_or_else(|error| panic!("{error}\n{}", launch.text));
        for part in [
            "# Launch 3 of k, captured on a device of sm_90.",
            "addresses = [{ at = 8, of = \"m1\", plus = 64 }]",
            "[[arg]]  # x\nrole = \"pointer\"\nof = \"m0\"\nplus = 4\n",
            "    { role = \"tensor_map\", of = \"map0\", offset = 0 },\n    \
             { role = \"u32\", offset = 128, value = [5, 0] },\n    \
             { role = \"pointer\", of = \"m1\", offset = 136 },\n    \
             { role = \"u32\", offset = 144, value = [7, 0, 8, 0, 9, 0, 10, 0, 11, 0] },\n    \
             { role = \"pointer\", of = \"m0\", plus = 16, offset = 184 },\n    \
             { role = \"u32\", offset = 192, value = [0, 0, 1, 0] },\n",
            "role = \"f32\"\nvalue = -inf\n",
            "of = \"m1\"\ndtype = \"bf16\"\noffset = 0\ndims = [64, 128]\nstrides = [128]\nbox = [64, 64]",
            "output = \"m0\"\nfile = \"m0.after.npy\"",
        ] {
            assert!(launch.text.contains(part), "{part}\n{}", launch.text);
        }
        let roles: Vec<&str> = spec.args.iter().map(super::super::ArgSpec::role).collect();
        assert_eq!(roles, ["buffer", "buffer", "tensor_map", "pointer", "struct", "f32", "tensor_map"]);
    }

    #[test]
    fn features_that_launch_files_lack_are_named() {
        let module = ptx::parse(TEXT).unwrap();
        let error = |record: &Record| captured(record, &module, &[], &[]).unwrap_err().to_string();
        assert_eq!(error(&Record { kernel: "j".to_owned(), ..complete() }), "the PTX has no entry j");
        let mut other = complete();
        other.params[2] = hexadecimal(&[0]);
        assert!(
            error(&other).ends_with(
                "its parameters have [8, 208, 4, 128] bytes, those of the launch [8, 208, 8, 128]"
            )
        );
        let with = |map: RecordedMap| error(&Record { maps: vec![map], ..complete() });
        let lacks = |what: &str| format!("parameter 3 has a tensor map with {what}, which launch files lack");
        assert_eq!(with(RecordedMap { im2col: true, ..map(3, 0) }), lacks("the mode im2col"));
        assert_eq!(
            with(RecordedMap { element_strides: vec![1, 2], ..map(3, 0) }),
            lacks("element strides [1, 2]")
        );
        assert_eq!(with(RecordedMap { swizzle: 4, ..map(3, 0) }), lacks("swizzle 4"));
        assert_eq!(with(RecordedMap { fill: 1, ..map(3, 0) }), lacks("fill 1"));
        assert!(with(RecordedMap { address: 64, ..map(3, 0) }).contains("memory at 0x40, which the driver"));
    }
}
