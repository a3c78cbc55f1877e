//! The header of a safetensors file, held against the file's length.

use std::collections::HashMap;
use std::ops::Range;

use device::MappedFile;
use safetensors::Dtype;
use safetensors::tensor::Metadata;
use serde_json::Value;
use structure_core::Refusal;

/// Bytes of the little-endian length that precedes the header.
const LENGTH: usize = 8;

/// A tensor of a file.
pub(crate) struct Tensor {
    pub name: String,
    pub dtype: Dtype,
    pub shape: Vec<usize>,
    /// Its bytes, counted from the start of the file.
    pub bytes: Range<usize>,
}

/// Reads the header of a mapped file. The tensors it names cover the rest of the file exactly.
pub(crate) fn read(file: &MappedFile) -> Result<Vec<Tensor>, Refusal> {
    let refuse = |problem: String| Refusal::file(file.path(), problem);
    let Some((&length, rest)) = file.split_first_chunk::<LENGTH>() else {
        return Err(refuse(format!("{} bytes, a safetensors file has at least {LENGTH}", file.len())));
    };
    let length = u64::from_le_bytes(length);
    let header = usize::try_from(length).ok().and_then(|length| rest.get(..length));
    let Some(header) = header else {
        return Err(refuse(format!(
            "the header claims {length} bytes, the file has {} after it",
            rest.len()
        )));
    };
    let metadata: Metadata = serde_json::from_slice(header).map_err(|error| explain(file, header, &error))?;

    let data = rest.len() - header.len();
    if metadata.data_len() != data {
        let described = metadata.data_len();
        return Err(refuse(format!(
            "the header describes {described} bytes of tensors, the file has {data}"
        )));
    }
    let start = LENGTH + header.len();
    let tensors = metadata.tensors().into_iter().map(|(name, info)| Tensor {
        name,
        dtype: info.dtype,
        shape: info.shape.clone(),
        bytes: start + info.data_offsets.0..start + info.data_offsets.1,
    });
    Ok(tensors.collect())
}

/// Names the tensor whose type is unknown, where that is what is wrong.
fn explain(file: &MappedFile, header: &[u8], error: &serde_json::Error) -> Refusal {
    let entries: HashMap<String, Value> = serde_json::from_slice(header).unwrap_or_default();
    let unknown = entries.into_iter().find_map(|(name, mut entry)| {
        let dtype = entry.get_mut("dtype")?.take();
        let known = serde_json::from_value::<Dtype>(dtype.clone()).is_ok();
        if known { None } else { Some((name, dtype.as_str()?.to_string())) }
    });
    match unknown {
        Some((tensor, dtype)) => Refusal::DTypeOutside {
            what: format!("{}: {tensor}", file.path().display()),
            dtype,
            accepted: crate::checkpoint::accepted(),
        },
        None => Refusal::file(file.path(), format!("unreadable header: {error}")),
    }
}
