"""vLLM's HTTP endpoints, and names that the client and the worker extension share."""

# HTTP endpoints of vLLM 0.32.
DETOKENIZE = "/detokenize"
GENERATE = "/inference/v1/generate"
HEALTH = "/health"
METRICS = "/metrics"
MODELS = "/v1/models"
WEIGHT_INFO = "/weight_info"
COLLECTIVE_RPC = "/collective_rpc"
IS_PAUSED = "/is_paused"
PAUSE = "/pause"
RESUME = "/resume"
START_UPDATE = "/start_weight_update"
LOAD_UPDATE = "/update_weights"
FINISH_UPDATE = "/finish_weight_update"
SET_WEIGHT_VERSION = "/update_weight_version"
LOAD_ADAPTER = "/v1/load_lora_adapter"
UNLOAD_ADAPTER = "/v1/unload_lora_adapter"

NODE_LINK = "/primerl/node"  # a websocket between the nodes of one server

DATA_PARALLEL_RANK = "X-data-parallel-rank"  # a header of requests

# Methods of the worker extension, called through COLLECTIVE_RPC.
WORKER_EXTENSION = "primerl.serving.worker.receiver.WeightReceiver"
LABEL_SHARED_KEYS = "label_shared_keys"
PREPARE_ADAPTER = "prepare_adapter"
PREPARE_WEIGHTS = "prepare_weights"
READ_ADAPTER = "read_adapter"
READ_WEIGHTS = "read_weights"
RELOAD_REFUSAL = "reload_refusal"
SERVED_CACHE_BLOCK = "served_cache_block"
SERVED_DTYPE = "served_dtype"
SERVED_ROUTES = "served_routes"
SERVED_VOCAB_SIZE = "served_vocab_size"
WEIGHT_RECEIPT = "weight_receipt"

# Weight transfer backends that the worker extension registers with vLLM.
FOLDER_BACKEND = "primerl"
NCCL_BACKEND = "primerl_nccl"

# The KV connector that shares keys and values by a folder.
FOLDER_CONNECTOR = "FolderConnector"
FOLDER_CONNECTOR_MODULE = "primerl.serving.worker.folder_connector"
