//! The record of a launch.

use serde::{Deserialize, Deserializer, de::Error};

/// A launch as the library recorded it: a file `record.json`, beside which the files lie that it names.
#[derive(Clone, Debug, PartialEq, Deserialize)]
pub struct Record {
    /// The kernel's name in its module.
    pub kernel: String,
    /// The number of the launch among those of this kernel, from 1.
    pub number: u64,
    /// Whether the launch went into a graph. The memory is then that at the time of the capture.
    pub in_graph: bool,
    pub grid: [u32; 3],
    pub block: [u32; 3],
    pub cluster: [u32; 3],
    /// Bytes.
    pub dynamic_shared: u32,
    pub cooperative: bool,
    /// The device's compute capability times 10; 0 if the driver did not tell it.
    pub capability: u32,
    /// The file of the module's image, in the folder above.
    pub image: String,
    pub params: Vec<RecordedParam>,
    pub buffers: Vec<RecordedBuffer>,
    pub maps: Vec<RecordedMap>,
    /// Why the launch was not recorded in full.
    pub refused: Option<String>,
}

/// The bytes of a parameter.
#[derive(Clone, Debug, PartialEq, Deserialize)]
pub struct RecordedParam {
    #[serde(deserialize_with = "hexadecimal")]
    pub bytes: Vec<u8>,
}

/// Memory of the device to which a parameter points.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
pub struct RecordedBuffer {
    pub address: u64,
    pub bytes: usize,
    /// The `.npy` file with the bytes before the launch.
    pub file: String,
    /// The file with the bytes after the launch.
    pub after: Option<String>,
}

/// A tensor map in a parameter.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
pub struct RecordedMap {
    /// The number of the parameter, and the map's byte there.
    pub param: usize,
    pub at: usize,
    pub address: u64,
    /// `CUtensorMapDataType`, `CUtensorMapInterleave`, `CUtensorMapSwizzle`, `CUtensorMapFloatOOBfill`.
    pub element: u32,
    pub interleave: u32,
    pub swizzle: u32,
    pub fill: u32,
    /// Whether the map is one of `cuTensorMapEncodeIm2col`; its box is then empty.
    pub im2col: bool,
    /// Elements, innermost dimension first.
    pub dims: Vec<u64>,
    /// Bytes, without the innermost dimension.
    pub strides: Vec<u64>,
    #[serde(rename = "box")]
    pub box_extents: Vec<u32>,
    pub element_strides: Vec<u32>,
}

fn hexadecimal<'de, D: Deserializer<'de>>(from: D) -> Result<Vec<u8>, D::Error> {
    let text = String::deserialize(from)?;
    let digits = text.as_bytes().chunks(2).map(|pair| {
        let pair = std::str::from_utf8(pair).ok().filter(|pair| pair.len() == 2)?;
        u8::from_str_radix(pair, 16).ok()
    });
    digits.collect::<Option<_>>().ok_or_else(|| D::Error::custom("expected hexadecimal digits"))
}

impl Record {
    /// Parses a `record.json`.
    ///
    /// # Errors
    /// When the text is no record.
    pub fn parse(text: &str) -> Result<Record, serde_json::Error> {
        serde_json::from_str(text)
    }

    /// The buffer that an address is in, and the bytes from its start.
    pub fn place(&self, address: u64) -> Option<(usize, u64)> {
        let holds = |buffer: &RecordedBuffer| {
            address.checked_sub(buffer.address).is_some_and(|at| at < buffer.bytes as u64)
        };
        let index = self.buffers.iter().position(holds)?;
        Some((index, address - self.buffers[index].address))
    }
}
