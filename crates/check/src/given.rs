//! A launch on memory that the caller gives. Nothing is drawn: the kernel runs on the given bytes, and the
//! caller gets the bytes back. No output is judged; hazards are.
//!
//! The launch is the header of a request to `flashcore emulate`, and its format is serde's.

use std::sync::Arc;

use emu::argument_bytes;
use ptx::{
    Access, Arg, BufferSpec, Element, Kernel, L2Promotion, Launch, StructArg, Swizzle, TensorMapSpec,
    Verified,
};
use serde::Deserialize;

use crate::launchfile::{Bound, BufferType, Init, Memory, Role};

/// Maximum memory of one launch in bytes.
const MEMORY_LIMIT: usize = 8 << 30;

/// A launch, without the contents of its buffers.
#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct GivenLaunch {
    /// The kernel's name in the PTX.
    pub entry: String,
    pub launch: Launch,
    /// Whether all CTAs are resident together.
    #[serde(default)]
    pub cooperative: bool,
    #[serde(default)]
    pub buffers: Vec<GivenBuffer>,
    /// Addresses of buffers that stand in buffers.
    #[serde(default)]
    pub addresses: Vec<GivenAddress>,
    #[serde(default)]
    pub maps: Vec<GivenMap>,
    /// One value for each parameter, in order.
    #[serde(default)]
    pub args: Vec<GivenArg>,
}

/// A buffer in global memory.
#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct GivenBuffer {
    /// The name in findings.
    pub name: String,
    pub bytes: usize,
    /// Whether the caller gives contents. Reading a byte of another buffer before a store is a finding.
    pub initialised: bool,
}

/// Eight bytes of a buffer that hold an address in a buffer.
#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct GivenAddress {
    /// The buffer that holds the address, and its byte there.
    pub buffer: usize,
    pub at: usize,
    /// The buffer that the address is in, and the bytes from its start.
    pub to: usize,
    pub offset: u64,
}

/// A tensor map, innermost dimension first.
#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct GivenMap {
    pub buffer: usize,
    /// Bytes from the buffer's start to element (0, 0, …).
    pub offset: u64,
    pub element: Element,
    pub extents: Vec<u64>,
    /// Bytes between neighbours along each dimension except the innermost.
    pub strides: Vec<u64>,
    #[serde(rename = "box")]
    pub box_extents: Vec<u32>,
    pub swizzle: Swizzle,
    /// As [`TensorMapSpec::wraps`]; `offset` is then taken modulo 2^64.
    #[serde(default)]
    pub wraps: bool,
}

/// The value of a parameter. Numbers are given by their bits.
#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(rename_all = "lowercase", deny_unknown_fields)]
pub enum GivenArg {
    /// The address of a buffer, plus bytes.
    Buffer {
        index: usize,
        offset: u64,
    },
    /// The number of a tensor map.
    Map(usize),
    U8(u8),
    U16(u16),
    U32(u32),
    U64(u64),
    /// A struct by value: its size, and its fields by their offset in bytes.
    Struct {
        bytes: u32,
        fields: Vec<(u32, GivenArg)>,
    },
}

impl From<&GivenArg> for Arg {
    fn from(given: &GivenArg) -> Arg {
        match *given {
            GivenArg::Buffer { index, offset } => Arg::Buffer { index, offset },
            GivenArg::Map(index) => Arg::TensorMap { index },
            GivenArg::U8(bits) => Arg::U8(bits),
            GivenArg::U16(bits) => Arg::U16(bits),
            GivenArg::U32(bits) => Arg::U32(bits),
            GivenArg::U64(bits) => Arg::U64(bits),
            GivenArg::Struct { bytes, ref fields } => {
                let fields = fields.iter().map(|(offset, field)| (*offset, Arg::from(field))).collect();
                Arg::Struct(StructArg { bytes, fields })
            }
        }
    }
}

/// Why a launch on given memory cannot run. The emulator checks the arguments against the kernel.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum GivenError {
    #[error("invalid value '{bytes} bytes' for buffers: expected at most {MEMORY_LIMIT} bytes together")]
    Memory {
        /// The sum, or `usize::MAX` beyond it.
        bytes: usize,
    },
    #[error("invalid value '{value}' for {key}: expected a buffer below {buffers}")]
    Buffer {
        /// The key of the request.
        key: String,
        value: usize,
        /// The number of buffers.
        buffers: usize,
    },
    #[error(
        "invalid value '{at}' for addresses[{index}].at: expected 8 bytes within the contents of buffer {buffer}"
    )]
    Address {
        /// The number of the address.
        index: usize,
        at: usize,
        buffer: usize,
    },
}

/// A launch that is bound to its module and to its memory.
#[derive(Clone, Debug)]
pub struct Given {
    pub bound: Bound,
    addresses: Vec<GivenAddress>,
    /// The caller's own bytes at the addresses, in their order.
    own: Vec<[u8; 8]>,
}

impl GivenLaunch {
    /// Bytes of all buffers with contents, which the caller gives in the order of the buffers.
    ///
    /// # Errors
    /// When the buffers are larger than the limit.
    pub fn contents(&self) -> Result<Vec<usize>, GivenError> {
        let total = self.buffers.iter().try_fold(0usize, |sum, buffer| sum.checked_add(buffer.bytes));
        match total.filter(|bytes| *bytes <= MEMORY_LIMIT) {
            Some(_) => Ok(self.buffers.iter().filter(|b| b.initialised).map(|b| b.bytes).collect()),
            None => Err(GivenError::Memory { bytes: total.unwrap_or(usize::MAX) }),
        }
    }

    /// Binds the launch to a module and to the contents of the buffers, in the order of
    /// [`GivenLaunch::contents`].
    ///
    /// # Errors
    /// A number that names no buffer, or an address outside its buffer.
    pub fn bind(&self, module: Verified, mut contents: Vec<Vec<u8>>) -> Result<Given, GivenError> {
        let mut own = Vec::with_capacity(self.addresses.len());
        for (index, address) in self.addresses.iter().enumerate() {
            self.require(address.to, || format!("addresses[{index}].to"))?;
            self.require(address.buffer, || format!("addresses[{index}].buffer"))?;
            let (at, buffer) = (address.at, address.buffer);
            let outside = GivenError::Address { index, at, buffer };
            let data = self.data_of(buffer).and_then(|data| contents.get_mut(data)).ok_or(outside.clone())?;
            let end = at.checked_add(8).ok_or(outside.clone())?;
            let place = data.get_mut(at..end).ok_or(outside)?;
            own.push(place.try_into().unwrap_or_default());
            place
                .copy_from_slice(&argument_bytes(&Arg::Buffer { index: address.to, offset: address.offset }));
        }
        for (index, map) in self.maps.iter().enumerate() {
            self.require(map.buffer, || format!("maps[{index}].buffer"))?;
        }
        let role = |(index, buffer): (usize, &GivenBuffer)| {
            let init = self.data_of(index).map_or(Init::Uninitialised, Init::File);
            Role::Fill(Memory::new(BufferType::U8, buffer.bytes, init))
        };
        let roles = self.buffers.iter().enumerate().map(role).collect();
        let mut bound = Bound::of_kernel(self.kernel(module), roles, None);
        bound.cooperative = vec![self.cooperative];
        bound.data = contents.into_iter().map(Arc::from).collect();
        Ok(Given { bound, addresses: self.addresses.clone(), own })
    }

    fn require(&self, value: usize, key: impl Fn() -> String) -> Result<(), GivenError> {
        let buffers = self.buffers.len();
        if value < buffers { Ok(()) } else { Err(GivenError::Buffer { key: key(), value, buffers }) }
    }

    /// The position of a buffer among those with contents.
    fn data_of(&self, buffer: usize) -> Option<usize> {
        let before = self.buffers[..buffer].iter().filter(|b| b.initialised).count();
        self.buffers[buffer].initialised.then_some(before)
    }

    fn kernel(&self, module: Verified) -> Kernel {
        let spec = |buffer: &GivenBuffer| BufferSpec {
            name: buffer.name.clone(),
            bytes: buffer.bytes,
            access: Access::ReadWrite,
        };
        let map = |map: &GivenMap| TensorMapSpec {
            buffer: map.buffer,
            offset: map.offset,
            element: map.element,
            extents: map.extents.clone(),
            strides: map.strides.clone(),
            box_extents: map.box_extents.clone(),
            swizzle: map.swizzle,
            l2_promotion: L2Promotion::default(),
            wraps: map.wraps,
        };
        Kernel {
            module,
            entry: self.entry.clone(),
            launch: self.launch,
            buffers: self.buffers.iter().map(spec).collect(),
            tensor_maps: self.maps.iter().map(map).collect(),
            args: self.args.iter().map(Arg::from).collect(),
        }
    }
}

impl Given {
    /// The buffers that a run changed, by their number. `after` are the bytes of all buffers after the run.
    /// Addresses that the kernel did not replace are the caller's own again.
    pub fn changed(&self, mut after: Vec<Vec<u8>>) -> Vec<(usize, Vec<u8>)> {
        let before = |index: usize| match self.bound.roles.get(index) {
            Some(Role::Fill(Memory { init: Init::File(data), .. })) => self.bound.data.get(*data),
            _ => None,
        };
        let is_changed: Vec<bool> = (0..after.len())
            .map(|index| before(index).is_none_or(|before| **before != *after[index]))
            .collect();
        for (address, own) in self.addresses.iter().zip(&self.own) {
            let range = address.at..address.at + 8;
            let (Some(given), Some(place)) = (
                before(address.buffer),
                after.get_mut(address.buffer).and_then(|b| b.get_mut(range.clone())),
            ) else {
                continue;
            };
            if given.get(range).is_some_and(|given| given == place) {
                place.copy_from_slice(own);
            }
        }
        let all = after.into_iter().enumerate().zip(is_changed);
        all.filter(|(_, changed)| *changed).map(|(buffer, _)| buffer).collect()
    }
}
