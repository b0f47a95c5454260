//! The kernel that writes keys and values into a cache: from new rows of sequences, whose lengths and page
//! table lie in device memory, or from rows with a slot each. It rotates keys and queries, rounds to 8-bit
//! caches, and writes the lengths after the append.
//!
//! Lengths, page tables, slots and positions are untrusted data: a row without a place in the cache is left
//! out, and no value leads outside of an array.

mod kernel;

use problem::{DType, Strides};
use ptx::Access;

use crate::error::accept;
use crate::program::Contracts;
use crate::{Arch, KernelArray, KernelError, PlanError, Program, draft};

/// The name of the generator in errors.
const NAME: &str = "cache";
/// Threads of a CTA.
const THREADS: u32 = 256;
/// Bytes that a thread moves at once, at most.
const CHUNK: usize = 16;

/// A tensor `[entry, head, row, dim]`: extents, and strides in elements, none of them negative.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct HeadRows {
    /// Number of elements in each dimension.
    pub extents: [usize; 4],
    /// Distances between entries, heads and rows.
    pub strides: Strides,
}

/// A write of keys and values into a cache.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct CacheWrite {
    /// Element type of the new rows and of the queries.
    pub from: DType,
    /// Element type of both caches: that of the new rows, or an 8-bit type. Elements of 8-bit caches are
    /// divided by their descale factor.
    pub to: DType,
    /// The new keys and values. Packed rows have one entry.
    pub new: [HeadRows; 2],
    /// The caches of keys and values. The entries are pages if there is a page table.
    pub caches: [HeadRows; 2],
    /// Where the rows go.
    pub places: RowPlaces,
    /// The rotation of keys and queries.
    pub rotation: Option<Rotation>,
    /// Strides of the descale factors of K and of V, `[batch, kv_head]`, in elements; `None` without factors.
    /// Rows with slots take the factors of batch entry 0.
    pub factors: [Option<[i64; 2]>; 2],
    /// The addresses of the tensors are multiples of this number of elements, up to 16.
    pub aligned: usize,
}

/// Where new rows go.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum RowPlaces {
    /// New row `i` of sequence `b` becomes row `lengths[b] + i` of the sequence. The kernel also writes
    /// lengths after the append.
    Sequences {
        /// Number of sequences.
        batch: usize,
        /// Whether new rows are packed, with an array of cumulative lengths (`batch + 1` elements).
        packed: bool,
        /// Entries of the page table for each sequence; `None` if each sequence has an entry of the cache.
        pages: Option<usize>,
        /// Rows of a sequence at most.
        capacity: usize,
    },
    /// New row `i` goes to row `slots[i]` of the cache, counted over all its entries. Negative slots, and
    /// those outside of the cache, are left out.
    Slots {
        /// Whether slots are 64-bit integers, and not 32-bit integers.
        wide: bool,
    },
}

/// Rotary embedding of new keys and of queries.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Rotation {
    /// Element type of the tables of cosines and sines.
    pub dtype: DType,
    /// Positions of the tables.
    pub positions: usize,
    /// Elements from one position to the next, of cosines and of sines.
    pub strides: [i64; 2],
    /// Pairs of a row that are rotated: the columns of the tables.
    pub pairs: usize,
    /// Whether dims `2 i` and `2 i + 1` form a pair. Else `i` and `i + pairs` do.
    pub interleaved: bool,
    /// Whether an array states the position of each sequence, in place of the length before the append.
    pub has_positions: bool,
    /// The queries.
    pub queries: HeadRows,
    /// Whether queries are packed, with an array of cumulative lengths.
    pub packed: bool,
    /// Whether each query has a position of its own. Else all queries have the position of the first.
    pub local: bool,
}

/// The lengths after the append, i32, in [`CacheWrite::arrays`].
pub const LENGTHS: &str = "lengths";
/// The rotated queries, dense `[entry, row, head, dim]`, in [`CacheWrite::arrays`].
pub const ROTATED: &str = "q_rotated";

/// The properties on which the code of a write depends. Extents, strides and lengths are launch parameters.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct CacheCode {
    from: DType,
    to: DType,
    /// Dims of keys and of values.
    dims: [u32; 2],
    /// Elements that a thread moves at once.
    width: u32,
    places: PlaceCode,
    rotation: Option<RotationCode>,
    /// Whether K and V have descale factors.
    has_factors: [bool; 2],
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum PlaceCode {
    Sequences { packed: bool, paged: bool },
    Slots { wide: bool },
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct RotationCode {
    dtype: DType,
    pairs: u32,
    interleaved: bool,
    has_positions: bool,
    packed: bool,
    local: bool,
}

/// Emits the kernel of a write.
///
/// # Errors
/// When extents, strides or types do not fit each other or the architecture.
pub fn emit(write: &CacheWrite, arch: &Arch) -> Result<Program, KernelError> {
    let code = write.code(arch)?;
    draft::emit(vec![kernel::draft(&code, write, arch)])
        .map_err(|violations| KernelError::Generator { family: NAME, violations })
}

/// The properties on which the code of a write depends, and the launch contract, without the code itself.
///
/// # Errors
/// As [`emit`].
pub fn bind(write: &CacheWrite, arch: &Arch) -> Result<(CacheCode, Contracts), KernelError> {
    let code = write.code(arch)?;
    Ok((code, draft::contracts(vec![kernel::draft(&code, write, arch)])))
}

impl HeadRows {
    /// Number of elements from the first to the last; `None` if a stride is negative or too large.
    fn span(&self) -> Option<usize> {
        let [entries, heads, rows, dim] = self.extents;
        if self.extents.contains(&0) {
            return Some(0);
        }
        let Strides { batch, head, row } = self.strides;
        let mut last = dim as i128 - 1;
        for (extent, stride) in [(entries, batch), (heads, head), (rows, row)] {
            if extent > 1 {
                last += i128::from(u64::try_from(stride).ok()?).checked_mul(extent as i128 - 1)?;
            }
        }
        (last < i128::from(i64::MAX / 8)).then_some(last as usize + 1)
    }

    /// Whether every row begins at a multiple of `elements`.
    fn rows_are_aligned(&self, elements: usize) -> bool {
        let [entries, heads, rows, dim] = self.extents;
        let Strides { batch, head, row } = self.strides;
        let fits = |(extent, stride): (usize, i64)| extent <= 1 || stride % elements as i64 == 0;
        dim.is_multiple_of(elements) && [(entries, batch), (heads, head), (rows, row)].into_iter().all(fits)
    }
}

impl RowPlaces {
    /// Number of sequences.
    const fn batch(self) -> usize {
        match self {
            RowPlaces::Sequences { batch, .. } => batch,
            RowPlaces::Slots { .. } => 1,
        }
    }
}

impl CacheWrite {
    /// All arrays of the kernel, in the order of its buffers.
    pub fn arrays(&self) -> Vec<KernelArray> {
        let mut all = Vec::new();
        let mut add = |name, elements: usize, bytes: usize, access| {
            all.push(KernelArray { name, bytes: elements * bytes, access });
        };
        let (from, to) = (self.from.bytes(), self.to.bytes());
        let of = |tensor: &HeadRows| tensor.span().unwrap_or(0);
        add("k_new", of(&self.new[0]), from, Access::Read);
        add("v_new", of(&self.new[1]), from, Access::Read);
        add("k", of(&self.caches[0]), to, Access::ReadWrite);
        add("v", of(&self.caches[1]), to, Access::ReadWrite);
        match self.places {
            RowPlaces::Slots { wide } => {
                add("slots", self.tokens(), if wide { 8 } else { 4 }, Access::Read);
            }
            RowPlaces::Sequences { batch, packed, pages, .. } => {
                add("cache_seqlens", batch, 4, Access::Read);
                if packed {
                    add("cu_seqlens_k_new", batch + 1, 4, Access::Read);
                }
                if let Some(pages) = pages {
                    add("page_table", batch * pages, 4, Access::Read);
                }
                add(LENGTHS, batch, 4, Access::Write);
            }
        }
        for (name, strides) in ["k_descale", "v_descale"].into_iter().zip(self.factors) {
            let Some([of_batch, of_head]) = strides else { continue };
            let last = |extent: usize, stride: i64| extent.saturating_sub(1) * stride as usize;
            let heads = self.new[0].extents[1];
            add(name, last(self.places.batch(), of_batch) + last(heads, of_head) + 1, 4, Access::Read);
        }
        if let Some(rotation) = &self.rotation {
            for (name, stride) in [("rotary_cos", rotation.strides[0]), ("rotary_sin", rotation.strides[1])] {
                let elements = rotation.positions.saturating_sub(1) * stride as usize + rotation.pairs;
                add(name, elements, rotation.dtype.bytes(), Access::Read);
            }
            if rotation.has_positions {
                add("rotary_seqlens", self.places.batch(), 4, Access::Read);
            }
            add("q", of(&rotation.queries), from, Access::Read);
            if rotation.packed {
                add("cu_seqlens_q", self.places.batch() + 1, 4, Access::Read);
            }
            add(ROTATED, rotation.queries.extents.iter().product(), from, Access::Write);
        }
        all
    }

    /// New rows of all entries. A CTA writes those of all heads.
    const fn tokens(&self) -> usize {
        self.new[0].extents[0] * self.new[0].extents[2]
    }

    /// Rows of queries, of all entries.
    fn queries(&self) -> usize {
        self.rotation.map_or(0, |rotation| rotation.queries.extents[0] * rotation.queries.extents[2])
    }

    /// CTAs of the grid: one for each new row and each query, and those that write lengths.
    fn ctas(&self) -> usize {
        let of_lengths = match self.places {
            RowPlaces::Sequences { batch, .. } => batch.div_ceil(THREADS as usize),
            RowPlaces::Slots { .. } => 0,
        };
        (self.tokens() + self.queries() + of_lengths).max(1)
    }

    /// The code of the write, which is checked first.
    fn code(&self, arch: &Arch) -> Result<CacheCode, PlanError> {
        accept("sm", arch.sm.into(), arch.sm >= 80, "80 and later")?;
        self.check_types(arch)?;
        self.check_extents()?;
        let width = self.width()?;
        let places = match self.places {
            RowPlaces::Sequences { packed, pages, .. } => {
                PlaceCode::Sequences { packed, paged: pages.is_some() }
            }
            RowPlaces::Slots { wide } => PlaceCode::Slots { wide },
        };
        let rotation = self.rotation.map(|rotation| RotationCode {
            dtype: rotation.dtype,
            pairs: rotation.pairs as u32,
            interleaved: rotation.interleaved,
            has_positions: rotation.has_positions,
            packed: rotation.packed,
            local: rotation.local,
        });
        let dims = self.new.map(|tensor| tensor.extents[3] as u32);
        let has_factors = self.factors.map(|strides| strides.is_some());
        Ok(CacheCode { from: self.from, to: self.to, dims, width, places, rotation, has_factors })
    }

    fn check_types(&self, arch: &Arch) -> Result<(), PlanError> {
        let refuse = |what: &str, dtype: DType, accepted: &str| {
            Err(PlanError::unsupported(NAME, what, dtype, accepted))
        };
        if self.from.is_fp8() {
            return refuse("the element type of new rows", self.from, "f16, bf16 or f32");
        }
        if self.to != self.from && !self.to.is_fp8() {
            return refuse("the element type of the cache", self.to, "that of the new rows, e4m3 or e5m2");
        }
        if self.to.is_fp8() {
            let rounds = arch.multiplies_fp8();
            accept("sm", arch.sm.into(), rounds, "89 and later, which round to 8-bit floats")?;
        }
        if self.factors.iter().any(Option::is_some) && !self.to.is_fp8() {
            return refuse("the element type of a cache with descale factors", self.to, "e4m3 or e5m2");
        }
        match &self.rotation {
            Some(rotation) if rotation.dtype.is_fp8() => {
                refuse("the element type of rotary_cos", rotation.dtype, "f16, bf16 or f32")
            }
            _ => Ok(()),
        }
    }

    fn check_extents(&self) -> Result<(), PlanError> {
        let queries = self.rotation.map(|rotation| rotation.queries);
        let named = [("k_new", self.new[0]), ("v_new", self.new[1])];
        let named = named.into_iter().chain([("k", self.caches[0]), ("v", self.caches[1])]);
        for (name, tensor) in named.chain(queries.map(|queries| ("q", queries))) {
            if tensor.span().is_none() {
                let (value, accepted) =
                    (format!("{:?}", tensor.strides), "strides of 0 and more, below 2^60");
                return Err(PlanError::unsupported(NAME, format!("the strides of {name}"), value, accepted));
            }
            for (what, extent) in ["entries", "heads", "rows", "dims"].into_iter().zip(tensor.extents) {
                accept(what, extent as u64, extent < 1 << 31, "fewer than 2^31")?;
            }
        }
        let [entries, _, rows, _] = self.caches[0].extents;
        let slots = entries as u64 * rows as u64;
        accept("rows of the cache", slots, slots < 1 << 31 || self.is_of_sequences(), "fewer than 2^31")?;
        let heads = self.new[0].extents[1].max(queries.map_or(0, |queries| queries.extents[1]));
        accept("heads", heads as u64, heads < 1 << 16, "fewer than 2^16")?;
        let dims = self.new[0].extents[3].max(self.new[1].extents[3]);
        accept("head_dim", dims as u64, dims <= 1 << 12, "4096 at most")?;
        if let RowPlaces::Sequences { batch, capacity, .. } = self.places {
            accept("batch", batch as u64, batch < 1 << 30, "fewer than 2^30")?;
            accept("seq_kv", capacity as u64, capacity < 1 << 31, "fewer than 2^31")?;
        }
        let ctas = self.ctas() as u64;
        accept("new rows and rows of queries", ctas, ctas < 1 << 31, "fewer than 2^31 in all")?;
        let Some(rotation) = &self.rotation else { return Ok(()) };
        accept("rows of rotary_cos", rotation.positions as u64, rotation.positions > 0, "1 or more")?;
        let fits = rotation.pairs > 0 && 2 * rotation.pairs <= self.new[0].extents[3];
        accept("columns of rotary_cos", rotation.pairs as u64, fits, "1 or more, at most half of head_dim")
    }

    const fn is_of_sequences(&self) -> bool {
        matches!(self.places, RowPlaces::Sequences { .. })
    }

    /// The largest number of elements that divides every row, stride and address.
    fn width(&self) -> Result<u32, PlanError> {
        let size = self.from.bytes();
        let queries = self.rotation.iter().map(|rotation| rotation.queries);
        let tensors: Vec<HeadRows> = self.new.into_iter().chain(self.caches).chain(queries).collect();
        let fits = |&width: &usize| {
            let rotates = self.rotation.is_none_or(|rotation| match rotation.interleaved {
                true => width % 2 == 0 && (2 * rotation.pairs).is_multiple_of(width),
                false => rotation.pairs.is_multiple_of(width),
            });
            rotates
                && self.aligned.is_multiple_of(width)
                && tensors.iter().all(|tensor| tensor.rows_are_aligned(width))
        };
        // A store of 8-bit elements has four of them, and any other access at least 4 bytes.
        let least = if self.to.is_fp8() { 4 } else { 4 / size };
        let widths = [8, 4, 2, 1].into_iter().filter(|width| (4..=CHUNK).contains(&(width * size)));
        widths.filter(|&width| width >= least).find(fits).map(|width| width as u32).ok_or_else(|| {
            let accepted = format!(
                "multiples of {least} elements for head dims, rotated dims, strides and addresses ({} where \
                 pairs are interleaved)",
                least.max(2)
            );
            PlanError::unsupported(
                NAME,
                "the alignment of rows",
                format!("{} elements", self.aligned),
                accepted,
            )
        })
    }
}
