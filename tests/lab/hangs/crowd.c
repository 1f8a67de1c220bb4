/* N processes that sleep: crowd N. The file /run/crowded appears when all are there. */
#include <fcntl.h>
#include <stdlib.h>
#include <unistd.h>

int main(int argc, char **argv) {
    int count = argc > 1 ? atoi(argv[1]) : 1;
    for (int n = 0; n < count; n++) {
        pid_t pid = fork();
        if (pid == 0) pause();
        if (pid < 0) break;
    }
    close(open("/run/crowded", O_CREAT | O_WRONLY, 0600));
    pause();
}
