#include "client.h"
PC_API int pc_client_gather(pc_client *client, uint64_t mapping_id, const struct pc_rows *rows,
                     const uint64_t *ids, uint64_t n_ids, void *out, uint64_t timeout_ns)
{
    (void)client; (void)mapping_id; (void)rows; (void)ids; (void)n_ids; (void)out; (void)timeout_ns;
    return pc__fail(PC_ERR_PROTOCOL, "not built yet");
}
